"""Random numbers that a script's own loop draws outside of its microbatches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training.subjects import adamw, network, rows

import lockstep as ls
from lockstep.testing.pool import WorkerPool

STEPS = 4


def numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def drawn(run_dir: str, plan: str, steps: int = STEPS) -> list[Any]:
    """What a loop with two passes over the microbatches draws, as DQN does for its exploration."""
    found = []
    with ls.Session(run_dir=run_dir, plan=plan, seed=0, allow_change=["steps"]) as session:
        model, optimizer = session.prepare(network, adamw)
        for step in session.steps(rows(24), global_batch=12, microbatch=4, steps=steps):
            found.append(numbers())
            for batch in step.microbatches():
                step.backward((model(batch[1]) - batch[2]).square().mean())
            found.append(numbers())
            step.commit(optimizer)
            found.append(numbers())
    return found


def test_they_are_the_same_on_any_number_of_processes_and_after_a_resume(
    pool: WorkerPool, tmp_path: Path
) -> None:
    expected = drawn(str(tmp_path / "alone"), "replicate=1")
    assert len({number for three in expected for number in three}) == 3 * 3 * STEPS
    for found in pool.run(2, drawn, str(tmp_path / "two"), "replicate=2"):
        assert found == expected
    drawn(str(tmp_path / "cut"), "replicate=1", STEPS - 1)
    assert drawn(str(tmp_path / "cut"), "replicate=1") == expected[-3:]
