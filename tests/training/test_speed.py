"""What a run says of its speed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import run_files
from torch import Tensor, nn
from training.subjects import recipe, squared_error

import lockstep as ls
from lockstep.testing.pool import WorkerPool


def weighted(model: nn.Module, batch: Any) -> ls.Sum:
    return ls.Sum(squared_error(model, batch))


def tokens(batch: Any) -> Tensor:
    return batch[0].numel() * Tensor([2.5])[0]


def timed(run_dir: str, plan: str, changes: Mapping[str, Any] | None = None) -> None:
    """A run on devices that are said to do 1 MFLOP/s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.training.train_module.peak_of", lambda device, precision: 1e6)
        ls.train(
            recipe(steps=4, tensor={"0": "colwise", "2": "rowwise"}, **(changes or {})),
            run_dir=run_dir,
            plan=plan,
            log_every=2,
        )


@pytest.mark.parametrize(
    ("plan", "processes"),
    [("replicate=1", 1), ("shard=2", 2), ("tensor=2", 2), ("checkpointing=full", 1)],
)
def test_the_models_arithmetic_is_counted_whole_under_every_plan(
    pool: WorkerPool, tmp_path: Path, plan: str, processes: int
) -> None:
    pool.run(processes, timed, str(tmp_path / "run"), plan)
    forward = 2 * (6 * 16 + 16 * 3)
    for row in run_files.metrics(tmp_path / "run"):
        assert row["mfu"] == pytest.approx(
            3 * forward * row["samples_per_second"] / (processes * 1e6)
        )


def tokens_of(batch: Any) -> Tensor:
    return batch[1].unsqueeze(1).expand(-1, 4, -1)


def mean_of_squares(output: Tensor, batch: Any) -> Tensor:
    return output.square().sum((1, 2)).mean()


def test_ranks_that_share_out_tokens_count_the_arithmetic_of_all_of_them(
    pool: WorkerPool, tmp_path: Path
) -> None:
    changes = {"inputs": tokens_of, "loss": mean_of_squares, "sequence": ls.Sequence(chunks=4)}
    pool.run(2, timed, str(tmp_path / "run"), "context=2", changes)
    forward = 4 * 2 * (6 * 16 + 16 * 3)
    for row in run_files.metrics(tmp_path / "run"):
        assert row["mfu"] == pytest.approx(3 * forward * row["samples_per_second"] / 2e6)


def test_what_the_recipe_weighs_is_told_a_second(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, timed, str(tmp_path / "run"), "replicate=2", {"loss": weighted, "weight": tokens})
    for row in run_files.metrics(tmp_path / "run"):
        assert row["weight_per_second"] == pytest.approx(2.5 * row["samples_per_second"])
