"""Memory over time on accelerators: what the device's allocator says, and what was allocated
before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from device.ranks import on_device
from training.subjects import FEATURES, OUTPUTS, recipe

import lockstep as ls
from lockstep.hooks.profiling import trace as traces
from lockstep.testing.pool import WorkerPool

SMALLEST = 512
"""Bytes of the device's smallest allocation: each of the tensors here has one."""


def profiled(run_dir: str, plan: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_PROFILE", "steps=1:3")
        patch.setattr(traces, "MOST_POINTS", 10**9)  # every moment
        ls.train(recipe(steps=4), run_dir=run_dir, plan=plan)


@pytest.mark.parametrize(("plan", "ranks"), [("replicate=1", 1), ("shard=2", 2)])
def test_the_causes_add_up_to_what_the_device_has_allocated(
    devices: WorkerPool, tmp_path: Path, plan: str, ranks: int
) -> None:
    devices.run(ranks, on_device, profiled, str(tmp_path), plan)
    for rank, found in enumerate(
        json.loads((tmp_path / "profile" / "memory.json").read_text())["ranks"]
    ):
        trace = json.loads((tmp_path / "profile" / f"rank-{rank}.json").read_text())
        allocated = [
            event["args"]
            for event in trace["traceEvents"]
            if event["name"] == "[memory]" and event["args"]["Device Type"] != 0
        ]
        assert {args["Device Id"] for args in allocated} == {rank}
        assert found["peak_bytes"] == max(args["Total Allocated"] for args in allocated)
        sizes: dict[str, Any] = found["bytes_by_cause"]
        parameters = 4 * (FEATURES * 16 + 16 + 16 * OUTPUTS + OUTPUTS)
        assert ranks > 1 or max(sizes["parameters"]) == parameters
        assert max(sizes["gradients"]) >= 4 * SMALLEST
        assert max(sizes["activations"]) >= SMALLEST
