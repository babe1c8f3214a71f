"""Law 1 and law 2 in a pipeline: the gradients and the masks of one process, under every schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from parallel.staged import in_a_pipeline, on_one_process

from lockstep.testing.pool import WorkerPool

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]
STEPS = [[3, 3, 3, 3], [3, 3, 3, 2, 3, 1, 1], [2], [3, 3, 3, 3]]
"""The samples of each microbatch: even, uneven and more than a multiple of the ranks, fewer than stages, even again."""

one_process = cache(lambda name, sizes, dtype: on_one_process(name, list(sizes), dtype))


def check(name: str, ranks: list[Any], steps: list[list[int]]) -> None:
    for step, sizes in enumerate(steps):
        exact, records = one_process(name, tuple(sizes), torch.float64)
        own, _ = one_process(name, tuple(sizes), torch.float32)
        found: dict[str, torch.Tensor] = {}
        counted: list[str] = []
        for rank in ranks:
            gradients, values, counts = rank[step]
            assert torch.allclose(torch.tensor(values), torch.tensor(records), rtol=1e-5)
            for parameter, gradient in gradients.items():
                assert torch.equal(found.setdefault(parameter, gradient), gradient), f"{parameter} differs between the ranks that hold it"
            counted += counts
        assert sorted(counted) == sorted(exact) == sorted(found)
        flat = {kind: torch.cat([each[name].reshape(-1) for name in exact]) for kind, each in (("e", exact), ("o", own), ("f", found))}
        error, own_error = ((flat[kind] - flat["e"]).norm() for kind in "fo")
        assert error <= 4 * own_error, f"step {step}: {error:.2e} and {own_error:.2e}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["mlp", "mlp with dropout", "recomputed", "tuples", "gpt"])
def test_the_gradient_is_one_process_in_float64_within_4_times_float32s_own_error(pool: WorkerPool, name: str, schedule: str) -> None:
    check(name, pool.run(2, in_a_pipeline, name, schedule, STEPS), STEPS)
