"""The allocator: what one step frees, the next one takes again."""

from __future__ import annotations

import os
import sys
from unittest.mock import patch

import pytest
import torch
from processes import ran

from lockstep.base import accelerator
from lockstep.testing.pool import WorkerPool
from lockstep.training.set_up import (
    OWN_GPU_SETTINGS,
    OWN_SETTINGS,
    Remark,
    cublas_workspace,
    expand_segments,
    keep_freed_memory,
)

CODE = """
import ctypes, resource, torch
from lockstep.training.set_up import keep_freed_memory
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # as glibc is set up, it depends on where things lie: on luck
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        tensors = [torch.ones(1 << 20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
given_back = faults()
assert keep_freed_memory({})
faults()
print(given_back, faults())
"""


@pytest.mark.command
def test_steps_fault_no_memory_in_again() -> None:
    given_back, kept = map(int, ran([sys.executable, "-c", CODE], check=True).stdout.split())
    assert given_back > 10_000
    assert kept < 100


@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_settings_of_the_users_own_are_left_alone(name: str) -> None:
    assert not keep_freed_memory({name: "1"})


def gpu_settings(environ: dict[str, str], answer: str = "") -> tuple[Remark | None, str]:
    with patch.object(accelerator, "allocation_error", lambda _: answer):
        return (
            expand_segments(torch.device("cpu"), environ),
            torch._C._accelerator_getAllocatorSettings(),
        )


def test_a_gpus_memory_is_held_in_pieces_that_grow_but_where_the_user_has_settings(
    pool: WorkerPool,
) -> None:
    assert pool.run(1, gpu_settings, {}) == [(None, "expandable_segments:True")]
    for name in OWN_GPU_SETTINGS:
        assert pool.run(1, gpu_settings, {name: "max_split_size_mb:512"}) == [(None, "")]


def test_a_gpu_that_cannot_do_it_is_left_as_it_was(pool: WorkerPool) -> None:
    reason = "CUDA driver error: operation not supported"
    ((remark, settings),) = pool.run(1, gpu_settings, {}, reason)
    assert remark == Remark("segments-not-expandable", {"reason": reason})
    assert settings == "expandable_segments:False"


def test_a_workspace_of_cublas_that_comes_too_late_is_said() -> None:
    assert cublas_workspace({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}) is None
    environ: dict[str, str] = {}
    remark = cublas_workspace(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert remark is not None
    assert str(remark.line).endswith(
        "import lockstep first, or set CUBLAS_WORKSPACE_CONFIG=:4096:8"
    )


FAKE = """
import os, sys
from types import SimpleNamespace
if sys.argv[1] != "not imported":
    sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: sys.argv[1] == "in use"))
import lockstep
print(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
"""


def test_importing_lockstep_sets_the_workspace_unless_the_gpu_is_in_use() -> None:
    environ = {
        name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"
    }

    def seen(torch: str, **given: str) -> str:
        line = [sys.executable, "-c", FAKE, torch]
        return ran(line, env=environ | given, check=True).stdout.strip()

    assert [seen("not imported"), seen("imported"), seen("in use")] == [
        ":4096:8",
        ":4096:8",
        "None",
    ]
    assert seen("imported", CUBLAS_WORKSPACE_CONFIG=":16:8") == ":16:8"
