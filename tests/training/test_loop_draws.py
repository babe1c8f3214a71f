"""Random numbers that a script's own loop draws outside of its microbatches."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training.subjects import FEATURES, OUTPUTS, adamw, network, recipe, rows

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


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.Linear(8, OUTPUTS))


def forward_outside(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(1, FEATURES))


def drawn_after_forwards(run_dir: str, plan: str) -> list[Any]:
    """What a loop draws after forwards that belong to no microbatch."""
    found = []
    with ls.Session(run_dir=run_dir, plan=plan, seed=0) as session:
        model, optimizer = session.prepare(with_dropout, adamw)
        for step in session.steps(rows(24), global_batch=12, microbatch=4, steps=STEPS):
            forward_outside(model)
            found.append(numbers())
            for batch in step.microbatches():
                step.backward((model(batch[1]) - batch[2]).square().mean())
            step.commit(optimizer)
            forward_outside(model)
            found.append(numbers())
    return found


class Draws(ls.Hook):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def after_step(self, run: ls.Run) -> None:
        forward_outside(run.model)
        self.found.append(numbers())

    def after_evaluation(self, run: ls.Run, metrics: Any) -> None:
        self.after_step(run)


def drawn_by_a_hook(run_dir: str, plan: str) -> list[Any]:
    """What a hook draws after forwards that belong to no microbatch."""
    hook = Draws()
    evaluation = ls.Evaluation(data=rows(12), every=1)
    trained = recipe(model=with_dropout, evaluation=evaluation)
    ls.train(trained, plan=plan, run_dir=run_dir, hooks=[hook])
    return hook.found


def drawn_after_closures(run_dir: str, plan: str) -> list[Any]:
    """What a loop draws after a commit with a closure."""
    found = []
    with ls.Session(run_dir=run_dir, plan=plan, seed=0) as session:
        _, optimizer = session.prepare(
            network, lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2)
        )
        for step in session.steps(rows(24), global_batch=12, microbatch=4, steps=2):
            step.compute(
                lambda batch: batch[1], lambda out, batch: (out - batch[2]).square().mean()
            )
            step.commit(optimizer)
            found.append(numbers())
    return found


@pytest.mark.parametrize("train", [drawn_after_forwards, drawn_by_a_hook, drawn_after_closures])
def test_they_do_not_go_on_from_a_microbatch(
    train: Callable[[str, str], list[Any]], pool: WorkerPool, tmp_path: Path
) -> None:
    expected = train(str(tmp_path / "alone"), "replicate=1")
    assert len({number for three in expected for number in three}) == 3 * len(expected) > 0
    for found in pool.run(2, train, str(tmp_path / "two"), "replicate=2"):
        assert found == expected
