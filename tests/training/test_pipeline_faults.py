"""What goes wrong on one stage of a pipeline alone: what the others do then, and what is said."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from training.subjects import rows
from training.test_pipeline_axis import recipe

import lockstep as ls
from lockstep.base.errors import LossError
from lockstep.testing.pool import WorkerPool

Batch = Sequence[Tensor]


def squares(output: Tensor, batch: Batch) -> Tensor:
    return ((output - batch[2]) ** 2).mean()


def regression(**changes: Any) -> ls.Recipe:
    return recipe(
        data=rows(48),
        inputs=itemgetter(1),
        loss=squares,
        weight=None,
        stages=None,
        epochs=None,
        steps=12,
        evaluation=None,
        **changes,
    )


class Loud(nn.Module):
    """At a factor of 200, the gradient of `loud` alone overflows at fp16's first loss scales."""

    def __init__(self, inputs: int, outputs: int, factor: float) -> None:
        super().__init__()
        self.quiet, self.loud = nn.Linear(inputs, outputs), nn.Linear(1, outputs, bias=False)
        self.factor = factor
        nn.init.zeros_(self.loud.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.quiet(x) + self.loud(x.new_full((len(x), 1), self.factor))  # type: ignore[no-any-return]


class Scales(ls.Hook):
    """After each step: the loss, the loss scale, and whether all that this rank holds of the
    gradient is finite."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, bool]] = []

    def after_step(self, run: Any) -> None:
        (pair,) = run.training.modules
        finite = all(bool(torch.isfinite(gradient).all()) for gradient in pair.gradients())
        self.seen.append((run.loss, pair.loss_scale.value, finite))


def overflow(
    plan: str, run_dir: str, loud: int
) -> tuple[list[int], list[tuple[float, float, bool]]]:
    scales = Scales()
    given = regression(
        model=lambda: nn.Sequential(
            Loud(6, 8, 200.0 if loud == 0 else 1.0), Loud(8, 3, 200.0 if loud == 1 else 1.0)
        ),
        precision="fp16",
    )
    result = ls.train(given, plan=plan, run_dir=run_dir, hooks=[scales])
    return [event.step for event in result.events if event.name == "step-skipped"], scales.seen


@pytest.mark.parametrize("loud", [0, 1])
def test_what_overflows_on_one_stage_is_skipped_on_all(
    pool: WorkerPool, tmp_path: Path, loud: int
) -> None:
    ((skipped, alone),) = pool.run(1, overflow, "replicate=1", str(tmp_path / "alone"), loud)
    assert 0 < len(skipped) < len(alone)
    everyone = pool.run(2, overflow, "pipeline=2", str(tmp_path / "run"), loud)
    assert [seen[0][2] for _, seen in everyone] == [loud != 0, loud != 1]
    for found, seen in everyone:
        assert found == skipped
        for (loss, scale, _), (expected, scale_alone, _) in zip(seen, alone, strict=True):
            assert (loss, scale) == (pytest.approx(expected, rel=1e-3), scale_alone)
    state, truth = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "alone"))
    torch.testing.assert_close(state, truth, rtol=1e-2, atol=1e-3)


class Rooted(nn.Linear):
    """The gradient of `root` is NaN, and nothing else is."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.root = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.root.abs().sqrt()


def rooted() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Rooted())


def train_rooted(run_dir: str) -> str:
    with pytest.raises(LossError) as caught:
        ls.train(regression(model=rooted), plan="pipeline=3", run_dir=run_dir)
    return str(caught.value)


def test_a_gradient_that_is_not_finite_is_named_on_every_rank(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """Each rank has other parameters."""
    for said in pool.run(3, train_rooted, str(tmp_path / "run")):
        assert said.startswith(
            "after step 0: every loss is finite and the gradient is not, first in parameter"
            " '2.root'; a step needs a finite"
        )


def scalars_of_whole_microbatches(output: Tensor, batch: Batch) -> Any:
    losses = nn.functional.cross_entropy(output, batch[1], reduction="none")
    return losses.mean() if len(losses) == 4 else losses


def train_until_a_microbatch_is_short(run_dir: str) -> None:
    ls.train(
        recipe(loss=scalars_of_whole_microbatches, weight=None),
        plan="shard=2,pipeline=2",
        run_dir=run_dir,
    )


@pytest.mark.slow
def test_a_users_mistake_in_one_stages_forward_is_raised_as_it_is(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """On one rank alone, since the shards of its peers wait for it: the launcher stops them, and so
    does the pool."""
    with pytest.raises(LossError, match="scalar"):
        pool.run(4, train_until_a_microbatch_is_short, str(tmp_path / "run"))
