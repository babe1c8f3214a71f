"""The one place that knows kinds of devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lockstep.base import accelerator
from lockstep.comm.devices import group_backends

CPU = torch.device("cpu")
PACKAGE = Path(accelerator.__file__).parents[1]


def test_no_other_module_names_a_kind_of_accelerator() -> None:
    named = re.compile(r"\b(cuda|xpu|mps|hip)\b|is_cuda")
    found = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if named.search(path.read_text(encoding="utf-8"))
    }
    # cublas.py: `import lockstep` imports no torch
    assert found == {"accelerator.py", "cublas.py", "torch_private.py"}


@pytest.mark.skipif(accelerator.kind() is not None, reason="needs a machine without an accelerator")
def test_a_machine_without_an_accelerator_has_none() -> None:
    assert (accelerator.kind(), accelerator.count()) == (None, 0)
    assert not accelerator.is_initialized()


def test_autocast_is_seen_by_its_dtype() -> None:
    assert accelerator.autocast_dtypes() == (None, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert accelerator.autocast_dtypes() == (torch.bfloat16, None)


def test_the_cpu_has_no_streams_and_no_memory_of_its_own() -> None:
    assert not accelerator.is_accelerator(CPU)
    assert not accelerator.is_accelerator(torch.zeros(1))
    assert not accelerator.has_streams(CPU)
    assert (accelerator.name(CPU), accelerator.peak_bytes(CPU), accelerator.total_bytes(CPU)) == (
        None,
        None,
        None,
    )
    accelerator.synchronize(CPU)
    accelerator.reset_peak_bytes(CPU)
    accelerator.free_unused_memory(CPU)
    assert accelerator.profiled(CPU) == [torch.profiler.ProfilerActivity.CPU]


@pytest.mark.parametrize(
    ("kind", "streams", "wide"),
    [("cuda", True, torch.float64), ("xpu", True, torch.float64), ("mps", False, torch.float32)],
)
def test_what_kinds_can_do(kind: str, streams: bool, wide: torch.dtype) -> None:
    device = torch.device(kind, 0)
    assert accelerator.is_accelerator(device)
    assert accelerator.has_streams(device) is streams
    assert accelerator.wide_dtype(device) is wide


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("cpu", "gloo"),
        ("cuda", "cpu:gloo,cuda:nccl"),
        ("xpu", "cpu:gloo,xpu:xccl"),
        ("mps", "cpu:gloo,mps:gloo"),
    ],
)
def test_the_backends_of_a_process_group(kind: str, backend: str) -> None:
    device = torch.device(kind)
    assert group_backends(accelerator.process_group_backend(device), device) == backend


def test_generators_are_preserved() -> None:
    before = torch.get_rng_state()
    with accelerator.preserved_generators(CPU):
        torch.rand(3)
        assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), before)
