"""The allocator: what one step frees, the next one takes again."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lockstep.testing.pool import WorkerPool
from lockstep.training.set_up import OWN_GPU_SETTINGS, OWN_SETTINGS, expand_segments, keep_freed_memory

CODE = """
import ctypes, resource, sys, torch
from lockstep.training.set_up import keep_freed_memory
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # as glibc is set up, it depends on where things lie: on luck
if sys.argv[1] == "kept":
    assert keep_freed_memory({})
def step():
    tensors = [torch.ones(4 << 20) for _ in range(3)]
for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", CODE, how], check=True, capture_output=True, text=True).stdout)


@pytest.mark.command
def test_steps_fault_no_memory_in_again() -> None:
    assert faults("given back") > 10_000
    assert faults("kept") < 100


@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_settings_of_the_users_own_are_left_alone(name: str) -> None:
    assert not keep_freed_memory({name: "1"})


def gpu_settings(environ: dict[str, str]) -> tuple[bool, str]:
    return expand_segments(environ), torch._C._accelerator_getAllocatorSettings()


def test_a_gpus_memory_is_held_in_pieces_that_grow_but_where_the_user_has_settings(pool: WorkerPool) -> None:
    assert pool.run(1, gpu_settings, {}) == [(True, "expandable_segments:True")]
    for name in OWN_GPU_SETTINGS:
        assert pool.run(1, gpu_settings, {name: "max_split_size_mb:512"}) == [(False, "")]
