"""A ReduceLROnPlateau as the schedule: it follows a metric of the evaluations, and is resumed with
the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from training.subjects import learned, recipe, rows, sgd

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.testing.pool import WorkerPool

VALUES = [3.0, 2.0, 2.5, 2.6, 1.0, 1.5]
"""The metric after each step."""
RATES = [0.1, 0.1, 0.1, 0.05, 0.025, 0.025]
"""Halved after each value that is worse than the best one before: those after steps 3, 4 and 6."""


def halving(optimizer: Optimizer) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


class Scripted(ls.Hook):
    """Adds a metric, and fails if asked to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self._fail_at = fail_at

    def after_evaluation(self, run: Any, metrics: dict[str, float]) -> None:
        metrics["score"] = VALUES[run.step - 1]

    def before_step(self, run: Any) -> None:
        if run.step == self._fail_at:
            raise RuntimeError("lost")


def follow(run_dir: str, plan: str, fail_at: int | None = None) -> None:
    def train(hook: Scripted) -> None:
        given = recipe(
            optimizer=sgd,
            steps=6,
            schedule=ls.OnMetric("score", halving),
            evaluation=ls.Evaluation(data=rows(8), every=1),
        )
        ls.train(
            given, run_dir=run_dir, plan=plan, hooks=[hook], log_every=1, saving=ls.Saving(every=1)
        )

    if fail_at is not None:
        with pytest.raises(RuntimeError, match="lost"):
            train(Scripted(fail_at))
    train(Scripted())


@pytest.mark.parametrize(("plan", "ranks"), [("replicate=1", 1), ("shard=2", 2)])
@pytest.mark.parametrize("fail_at", [None, 4])
def test_the_rate_follows_the_metric(
    pool: WorkerPool, tmp_path: Path, plan: str, ranks: int, fail_at: int | None
) -> None:
    pool.run(ranks, follow, str(tmp_path / "run"), plan, fail_at)
    assert [row["lr"] for row in learned(tmp_path / "run") if "lr" in row] == pytest.approx(RATES)


def zero(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(batch[1]).sum() * 0 + 1


def with_tensor(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)


@pytest.mark.parametrize("optimizer", [sgd, with_tensor])
def test_without_a_metric_it_follows_the_loss_of_the_evaluation(
    tmp_path: Path, optimizer: Any
) -> None:
    given = recipe(
        optimizer=optimizer,
        steps=4,
        loss=zero,
        schedule=halving,
        evaluation=ls.Evaluation(data=rows(8), every=1),
    )
    ls.train(given, run_dir=str(tmp_path / "run"), log_every=1)
    assert [row["lr"] for row in learned(tmp_path / "run") if "lr" in row] == pytest.approx(
        [0.1, 0.1, 0.05, 0.025]
    )


@pytest.mark.parametrize("evaluation", [None, ls.Evaluation(data=rows(8))])
def test_it_is_refused_without_evaluations(tmp_path: Path, evaluation: Any) -> None:
    with pytest.raises(
        RecipeError,
        match=(
            r"a ReduceLROnPlateau follows the evaluations' 'loss', and Recipe.evaluation has none"
        ),
    ):
        ls.train(
            recipe(optimizer=sgd, schedule=halving, evaluation=evaluation),
            run_dir=str(tmp_path / "run"),
        )
