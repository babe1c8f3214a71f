"""The place of the first value that is not finite, in the step that ended a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from replay.test_replay_probe import answer, read
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training.subjects import FEATURES, OUTPUTS, recipe, rows

import lockstep as ls
from lockstep.base.errors import LossError
from lockstep.cli.replay import ended_in
from lockstep.replay.not_finite import NotFinite, first_not_finite
from lockstep.replay.request import ReplayRequest
from lockstep.testing.pool import WorkerPool

BAD = 11
"""The sample that is not like the others."""
LAYER = NotFinite(stage="forward", layer="a")
MASK = NotFinite(stage="forward", layer="mask")


def data(value: float, *, target: float | None = None) -> TensorDataset:
    index, features, targets = rows(48).tensors
    features[BAD] = value
    if target is not None:
        targets[BAD] = target
    return TensorDataset(index, features, targets)


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Norms(nn.Module):
    """Its gradient is NaN where all features are 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(1, keepdim=True).sqrt() * torch.ones(OUTPUTS)


class OwnCode(nn.Module):
    """Takes a logarithm between two layers, and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.mask, self.last = Mask(), last()

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) + self.mask(x).exp()).abs().log())


class Mask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, -math.inf)


class Skewed(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.bias[0] = math.inf


def model_with(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model whose last layer makes the outputs."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, FEATURES, bias=False), *(each() for each in layers)
        )

    return model


def last() -> nn.Module:
    return nn.Linear(FEATURES, OUTPUTS)


def square(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return (model(batch[1]) - batch[2]).square().mean()


def logarithm(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return (model(batch[1]).square().mean() + 1) * batch[2].sum(1).abs().log().mean()


def root(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return model(batch[1]).abs().sum(1).sqrt().mean()


def divided(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    x = batch[1] / batch[1].abs().sum(1, keepdim=True)
    return (model(x) - batch[2]).square().mean()


CASES: dict[str, tuple[dict[str, Any], tuple[str, str, str, list[int]]]] = {
    "batch": (
        {"model": model_with(last), "data": data(math.nan)},
        ("batch", "", "", [BAD]),
    ),
    "input": (
        {"model": model_with(last), "data": data(0.0), "loss": divided},
        ("input", "", "", [BAD]),
    ),
    "layer": (
        {"model": model_with(Exp, last), "data": data(3e3)},
        ("forward", "1", "Exp", [BAD]),
    ),
    "own code": (
        {"model": OwnCode, "data": data(0.0)},
        ("forward", "", "OwnCode", [BAD]),
    ),
    "loss": (
        {"model": model_with(last), "data": data(1.0, target=0.0), "loss": logarithm},
        ("loss", "", "", []),
    ),
    "backward": (
        {"model": model_with(Norms), "data": data(0.0)},
        ("backward", "1", "SqrtBackward0", [BAD]),
    ),
    "backward of the loss": (
        {"model": model_with(), "data": data(0.0), "loss": root},
        ("backward", "", "SqrtBackward0", [BAD]),
    ),
}


def ended_and_again(
    folder: Path, given: dict[str, Any], plan: str, made_by: str | None = None
) -> int:
    """Train until a value is not finite, and make this step again. Returns its
    number."""

    def train(run_dir: str, plan: str) -> None:
        ls.train(
            recipe(**{"loss": square, "steps": 6, **given}),
            plan=plan,
            run_dir=run_dir,
            log_every=4,
            saving=ls.Saving(every=2, last=3),
        )

    with pytest.raises(LossError):
        train(f"{folder}/made", made_by or plan)
    step = ended_in(folder / "made")
    assert step is not None
    request = ReplayRequest(
        folder=folder / "again",
        checkpoints=f"{folder}/made/checkpoints",
        before=step,
        begins_anew=step < 3,
        step=step,
    )
    answer(request, lambda: train(f"{folder}/again/run", plan))
    return step


def firsts(folder: Path, ranks: int) -> tuple[list[NotFinite | None], list[dict[str, Any]]]:
    _, parts = read(folder / "again", ranks)
    found = [
        (
            all(map(math.isfinite, [each["total"], *each["squares"].values()])),
            [NotFinite(**place) for place in each["places"]],
        )
        for each in parts
    ]
    return first_not_finite(found), parts


@pytest.mark.parametrize(
    ("name", "plan"),
    [*((name, "numerics=bitwise") for name in CASES)]
    + [(name, "checkpointing=full") for name in ("layer", "backward")],
)
def test_the_first_place_is_named(tmp_path: Path, name: str, plan: str) -> None:
    given, (stage, layer, operation, samples) = CASES[name]
    ended_and_again(tmp_path, given, plan)
    places, parts = firsts(tmp_path, 1)
    (bad,) = (number for number, each in enumerate(parts) if BAD in each["samples"])
    for number, place in enumerate(places):
        if number != bad:
            assert place is None
            continue
        assert place is not None
        assert (place.stage, place.layer, place.operation) == (stage, layer, operation)
        assert place.samples == samples
        assert place.is_in_model == (name != "backward of the loss")
        assert place.text()


def of_two(folder: Path) -> None:
    ended_and_again(folder, CASES["backward"][0], "replicate=2", "shard=2")


def test_the_ranks_of_a_replay_name_it_too(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, of_two, tmp_path)
    (place,) = filter(None, firsts(tmp_path, 2)[0])
    assert (place.stage, place.layer, place.operation) == CASES["backward"][1][:3]


def test_a_parameter_that_is_not_finite_is_named(tmp_path: Path) -> None:
    skewed = {"model": model_with(lambda: Skewed(FEATURES, OUTPUTS))}
    assert ended_and_again(tmp_path, skewed, "replicate=1") == 1
    places, _ = firsts(tmp_path, 1)
    assert len(places) == 4
    assert {place.text() for place in places if place is not None} == {
        "the output of layer 1 (Skewed) in the forward, whose bias is not finite"
    }


def test_a_place_that_finite_microbatches_have_too_is_passed_over() -> None:
    assert first_not_finite([(True, [MASK]), (False, [MASK, LAYER])]) == [None, LAYER]
    assert first_not_finite([(False, [MASK]), (True, [MASK])]) == [None, None]


def test_a_run_that_went_on_has_not_ended_in_the_step(tmp_path: Path) -> None:
    def written(*events: dict[str, Any], steps: int = 2) -> int | None:
        (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in events))
        row = json.dumps({"step": steps, "loss": 1.0})
        (tmp_path / "metrics.jsonl").write_text(f"{row}\n")
        return ended_in(tmp_path)

    failed = {"step": 2, "event": "run-failed", "not_finite_in": 3}
    resumed, ended = ({"step": 2, "event": name} for name in ("run-started", "run-ended"))
    assert written(failed) == written(failed, resumed) == 3
    assert written(failed, resumed, ended) is written(failed, steps=3) is None
    assert written(failed, {"step": 2, "event": "run-failed", "error": "x"}) is None
    assert written({**failed, "not_finite_in": "3"}) is None
