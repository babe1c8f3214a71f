"""Law 4: nothing of the model changes before the reduced gradient is known to all ranks, and
finite."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training.subjects import (
    adamw,
    each_of,
    recipe,
    rows,
    same,
    samples_at,
    squared_error,
    state_of,
)

import lockstep as ls
from lockstep.assignment import contiguous_range
from lockstep.base.errors import LossError
from lockstep.testing.pool import WorkerPool

WORLD_SIZES = (1, 3)
SAMPLES, GLOBAL_BATCH, MICROBATCH = 48, 16, 4
BAD_STEP, BAD_MICROBATCH = 1, 2
POSITION = BAD_STEP * GLOBAL_BATCH + BAD_MICROBATCH * MICROBATCH
BAD_SAMPLES = samples_at(POSITION, POSITION + MICROBATCH, of=SAMPLES)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.powers = nn.ParameterList([torch.zeros(3)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def with_a_bad_sample(value: float) -> TensorDataset:
    index, features, targets = rows(SAMPLES).tensors
    features[BAD_SAMPLES[1], 0] = value
    return TensorDataset(index, features, targets)


class Halves(nn.Module):
    """Two layers, of which the gradient of the second one alone grows with the first feature where
    that is 1000 or more."""

    def __init__(self) -> None:
        super().__init__()
        self.quiet = nn.Linear(6, 3)
        self.loud = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 3)


def overflowing(model: Halves, batch: Sequence[Tensor]) -> Tensor:
    features = batch[1].clamp(-3, 3)
    loudness = batch[1][:, 0].max() if bool((batch[1] >= 1000).any()) else 1.0
    return (
        squared_error(model.quiet, [batch[0], features, batch[2]]) / 10
        + model.loud(features).float().square().mean() * loudness / 10
    )


def infinite(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return squared_error(model, batch) / (0.0 if bool(batch[1].isnan().any()) else 1.0)


def with_an_infinite_slope(model: Normed, batch: Sequence[Tensor]) -> Tensor:
    """The slope of a square root at 0 is infinite, and times 0 it is NaN: the loss is finite, and
    the gradient of `powers` is not."""
    power = model.powers[0]
    return squared_error(model, batch) + (
        power.abs().sqrt().sum() if bool((batch[1] == 0).any()) else (power * 0).sum()
    )


def hidden(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """NaN by a choice that lets no gradient through: the gradient is finite."""
    loss = squared_error(model, [batch[0], batch[1].nan_to_num(), batch[2]])
    return torch.where(batch[1].isnan().any(), torch.nan, loss)


def weights_of(batch: Sequence[Tensor]) -> Tensor:
    return batch[1].new_tensor(len(batch[1]))


def as_sum(model: nn.Module, batch: Sequence[Tensor]) -> ls.Sum:
    return ls.Sum(squared_error(model, batch) * len(batch[1]))


def as_loss(model: nn.Module, batch: Sequence[Tensor]) -> ls.Loss:
    return ls.Loss(squared_error(model, batch) * len(batch[1]), len(batch[1]))


def with_a_weight_of(value: float) -> Callable[..., ls.Loss]:
    return partial(weighted_by, value)


def weighted_by(value: float, model: nn.Module, batch: Sequence[Tensor]) -> ls.Loss:
    """Weights of 1, but for the bad sample's microbatch."""
    return ls.Loss(
        squared_error(model, batch), value if int(batch[0][1]) == BAD_SAMPLES[1] else 1.0
    )


class Standing(ls.Hook):
    """The model and the optimizer as they stand, and as they stood after each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_start(self, run: Any) -> None:
        self.run = run
        self.seen.append(self.now())

    def after_step(self, run: Any) -> None:
        self.seen.append(self.now())

    def now(self) -> dict[str, Any]:
        optimizers = [
            copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in self.run.optimizers
        ]
        return {"model": state_of(self.run.model), "optimizers": optimizers}


def fail(run_dir: str, numerics: str, changes: dict[str, Any]) -> tuple[str, bool, int]:
    """The error's text, whether the model and the optimizer are as after the step before, and how
    many steps there were."""
    standing = Standing()
    given = {
        "model": Normed,
        "data": with_a_bad_sample(torch.nan),
        "steps": 3,
        "clip_norm": 0.1,
        **changes,
    }
    try:
        ls.train(recipe(**given), plan=f"numerics={numerics}", run_dir=run_dir, hooks=[standing])
    except LossError as error:
        return str(error), same(standing.now(), standing.seen[-1]), len(standing.seen) - 1
    raise AssertionError("it trained")


def weightless(model: nn.Module, batch: Sequence[Tensor]) -> ls.Loss:
    return ls.Loss((model(batch[1]) * 0).sum() + 1.0, 0.0)


def not_finite(owner: int) -> str:
    return (
        f"after step {BAD_STEP}: the loss is nan in microbatch {BAD_MICROBATCH}, computed by rank"
        f" {owner} from samples {BAD_SAMPLES}; a step needs a finite loss; the model was not"
        " changed by this step: check those samples"
    )


GRADIENT = (
    f"after step {BAD_STEP}: every loss is finite and the gradient is not, first in parameter"
    " 'powers.0'; a step needs a finite gradient; the model was not changed by this step"
)
SLOPE = {"data": with_a_bad_sample(0.0), "loss": with_an_infinite_slope}
FAILURES: list[tuple[str, dict[str, Any], str | None]] = [
    ("fast", {"loss": squared_error}, None),
    ("bitwise", {"loss": squared_error}, None),
    ("fast", {"loss": infinite}, None),
    ("bitwise", {"loss": hidden}, None),
    ("fast", {"loss": as_sum, "weight": weights_of}, None),
    ("bitwise", {"loss": as_loss}, None),
    ("fast", {"loss": as_loss}, None),
    ("fast", {"loss": squared_error, "precision": "fp16"}, None),
    ("bitwise", {"loss": squared_error, "precision": "fp16"}, None),
    ("fast", {**SLOPE, "clip_norm": None}, GRADIENT),
    ("fast", {**SLOPE, "clip_norm": 0.1}, GRADIENT),
    *(
        (
            "fast",
            {"data": rows(SAMPLES), "loss": with_a_weight_of(value)},
            f"after step {BAD_STEP}: the weight of microbatch {BAD_MICROBATCH} is {value}; it"
            " divides the summed loss, and must be finite and not negative",
        )
        for value in (-2.0, torch.inf, torch.nan)
    ),
    (
        "fast",
        {"data": rows(SAMPLES), "loss": weightless},
        "after step 0: term 'loss' of the loss is 4 in a global batch in which its weights add up"
        " to 0; a term that counts nothing",
    ),
]
"""Numerics, changes of the recipe, and the error's text; None for a loss that is not finite."""


def fail_each(run_dir: str) -> list[Any]:
    return each_of(fail, run_dir, [row[:2] for row in FAILURES])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_is_not_finite_is_named_on_all_ranks_and_changes_nothing(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    owner = next(
        rank
        for rank in range(world_size)
        if BAD_MICROBATCH in contiguous_range(GLOBAL_BATCH // MICROBATCH, rank, world_size)
    )
    everyone = pool.run(world_size, fail_each, str(tmp_path), timeout_seconds=50)
    for (numerics, changes, text), *ranks in zip(FAILURES, *everyone, strict=True):
        for said, unchanged, steps in ranks:
            case = (numerics, changes, said)
            assert said.startswith(text or not_finite(owner)), case
            assert unchanged, case
            assert steps == (0 if changes["loss"] is weightless else BAD_STEP), case


class Scale(Standing):
    def now(self) -> dict[str, Any]:
        (pair,) = self.run.training.modules
        return {**super().now(), "scale": pair.loss_scale.value}


def overflow(
    run_dir: str, three_optimizers: bool, global_batch: int
) -> tuple[list[dict[str, Any]], list[Any], float]:
    scale = Scale()
    halves = recipe(
        model=Halves,
        data=with_a_bad_sample(1000.0),
        loss=overflowing,
        optimizer=three_adamws if three_optimizers else adamw,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        precision="fp16",
        clip_norm=1.0,
        steps=SAMPLES // global_batch,
        global_batch=global_batch,
    )
    result = ls.train(halves, run_dir=run_dir, hooks=[scale], log_every=2)
    rate = scale.run.optimizers[0].param_groups[0]["lr"]
    return scale.seen, [event for event in result.events if event.name == "step-skipped"], rate


def three_adamws(model: Halves) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(part.parameters(), lr=1e-2)
        for part in (model.quiet, model.loud, model.unused)
    ]


def overflow_each(run_dir: str, global_batch: int) -> list[Any]:
    return each_of(overflow, run_dir, [(three, global_batch) for three in (False, True)])


@pytest.mark.parametrize(
    ("world_size", "global_batch"),
    [(1, 16), (2, 16), (3, 8), pytest.param(4, 4, marks=pytest.mark.slow)],
)
def test_an_overflow_of_fp16_skips_the_step_on_all_ranks_and_halves_the_scale(
    pool: WorkerPool, tmp_path: Path, world_size: int, global_batch: int
) -> None:
    bad = POSITION // global_batch
    everyone = pool.run(world_size, overflow_each, str(tmp_path), global_batch)
    for three_optimizers, *ranks in zip((False, True), *everyone, strict=True):
        for seen, events, rate in ranks:
            assert same(seen, ranks[0][0]), three_optimizers
            skipped = [
                step
                for step, (before, after) in enumerate(pairwise(seen))
                if same(before["model"], after["model"])
            ]
            assert skipped == [event.step for event in events] == [bad], three_optimizers
            assert same(seen[bad]["optimizers"], seen[bad + 1]["optimizers"]), three_optimizers
            scale = seen[0]["scale"]
            assert [standing["scale"] for standing in seen] == [scale] * (bad + 1) + [scale / 2] * (
                len(seen) - bad - 1
            ), three_optimizers
            assert events[0].details == {
                "reason": "the scaled gradient overflowed; the loss scale was halved"
            }
            assert rate == 1e-2 * 0.5 ** (len(seen) - 2), three_optimizers


def rootless(model: Any, batch: Any) -> Any:
    """Its gradient is NaN at any scale: the square root of 0."""
    output = model(batch[1]).float()
    return output.square().mean() + (output - output.detach()).abs().sqrt().sum()


def never_step(run_dir: str, steps: int) -> tuple[str, int]:
    standing = Standing()
    try:
        ls.train(
            recipe(loss=rootless, precision="fp16", steps=steps), run_dir=run_dir, hooks=[standing]
        )
    except LossError as error:
        return str(error), len(standing.seen) - 1
    raise AssertionError("it trained")


def never_step_each(run_dir: str) -> list[Any]:
    return each_of(never_step, run_dir, [(40,), (9,)])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_is_not_finite_at_any_scale_of_fp16_ends_the_run(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    """And a run none of whose steps was applied has failed."""
    for (text, steps), (none_applied, in_vain) in pool.run(
        world_size, never_step_each, str(tmp_path)
    ):
        assert text.startswith(
            "after step 17: every loss is finite and the gradient is not, first in parameter"
        )
        assert "after 18 steps in a row, at a loss scale of 0.5" in text
        assert steps == 17
        assert none_applied.startswith(
            "the model was updated in none of the 9 steps: the fp16 gradient overflowed in each, at last at a"
            " loss scale of 256"
        )
        assert in_vain == 9


def test_eight_overflows_in_a_row_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LossError):
        ls.train(
            recipe(loss=rootless, precision="fp16", steps=40),
            run_dir=str(tmp_path / "run"),
            log_every=1,
        )
    assert capsys.readouterr().err.count("warning: 8 steps in a row were skipped") == 1


class StopsAtOnce(ls.Hook):
    def after_evaluation(self, run: Any, metrics: Any) -> None:
        run.stop("seen enough")


def overflow_and_stop(run_dir: str) -> list[tuple[str, int]]:
    """The step that is skipped comes before the evaluation that ends training, and no logging step
    does."""
    evaluation = ls.Evaluation(data=rows(4), every=BAD_STEP + 1)
    given = recipe(
        model=Halves,
        data=with_a_bad_sample(1000.0),
        loss=overflowing,
        precision="fp16",
        steps=3,
        evaluation=evaluation,
    )
    result = ls.train(given, run_dir=run_dir, hooks=[StopsAtOnce()], log_every=50)
    return [(event.name, event.step) for event in result.events if event.name != "slow-precision"]


def test_a_skipped_step_is_an_event_even_where_training_stops_before_the_next_logging_step(
    pool: WorkerPool, tmp_path: Path
) -> None:
    names = [
        ("run-started", 0),
        ("generators-seeded", 0),
        ("gradient-reducer", 0),
        ("step-skipped", BAD_STEP),
        ("stopped", BAD_STEP + 1),
        ("run-ended", BAD_STEP + 1),
    ]
    assert pool.run(2, overflow_and_stop, str(tmp_path / "run")) == [names] * 2
