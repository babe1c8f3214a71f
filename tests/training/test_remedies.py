"""What errors recommend works: each mistake is refused in these words, and the run that follows them trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from training.subjects import FEATURES, OUTPUTS, adamw, network, recipe, rows, sgd, squared_error

import lockstep as ls
from lockstep.base.errors import UserError

HELD_OUT = rows(8, seed=9)
Act = Callable[[Any], None]


class At(ls.Hook):
    """Calls `act(run)` after each step."""

    def __init__(self, act: Act) -> None:
        self.act = act

    def after_step(self, run: Any) -> None:
        self.act(run)


class Moving(nn.Module):
    """A buffer that its forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, OUTPUTS)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1.0
        return self.layer(x)


class Named(Moving):
    self_updating_buffers = ("seen",)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows(48))


def factory(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: kind()


def replaced(run: Any) -> None:
    run.model[2] = nn.Linear(16, OUTPUTS)


def overwritten(run: Any) -> None:
    with torch.no_grad():
        run.model[2].weight.fill_(0.5)


def added(run: Any) -> None:
    run.modules[0].optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def rate(run: Any) -> None:
    run.modules[0].optimizers[0].param_groups[0]["lr"] = 0.5 ** (run.step + 1)


def head_alone(model: nn.Module) -> torch.optim.Optimizer:
    """All parameters, of which the first layer's are frozen."""
    model[0].requires_grad_(False)  # type: ignore[index]
    return sgd(model)


def with_plateau(**given: Any) -> dict[str, Any]:
    return {"schedule": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), **given}


def collected(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    output: Tensor = model(batch[1])
    return output


def errors(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return (model(batch[1]) - batch[2]).pow(2).mean(1)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, OUTPUTS))


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A mistake, what is said about it, and the same training as the error recommends it."""

    mistake: dict[str, Any] | Callable[[], dict[str, Any]]
    says: str
    remedy: dict[str, Any]
    hooks: Sequence[ls.Hook] = ()
    remedy_hooks: Sequence[ls.Hook] = ()


GATHERED = ls.Gathered(collected, lambda rows: rows.pow(2).mean())
REMEDIES = {
    "a DataLoader": Remedy(
        mistake={"data": DataLoader(rows(48), batch_size=16)},
        says=r"give data=loader\.dataset",
        remedy={"data": DataLoader(rows(48), batch_size=16).dataset},
    ),
    "an iterable": Remedy(mistake={"data": Endless()}, says="Stream", remedy={"data": ls.Stream.of(Endless(), shards=4)}),
    "epochs of a stream": Remedy(
        mistake={"data": ls.Stream.of(Endless(), shards=4), "epochs": 1},
        says="give steps=",
        remedy={"data": ls.Stream.of(Endless(), shards=4), "steps": 2},
    ),
    "steps and epochs": Remedy(mistake={"steps": 2, "epochs": 1}, says="give exactly one of the two", remedy={"epochs": 1}),
    "drop_last with steps": Remedy(
        mistake={"steps": 2, "drop_last": True}, says="with steps, a batch may span two epochs.*leave it out", remedy={"steps": 2}
    ),
    "BatchNorm over one sample": Remedy(
        mistake={"model": normalised, "data": rows(17), "epochs": 1},
        says="use drop_last=True",
        remedy={"model": normalised, "data": rows(17), "epochs": 1, "drop_last": True},
    ),
    "a group added": Remedy(
        mistake={"optimizer": sgd},
        hooks=[At(added)],
        says=r"run\.freeze.*run\.unfreeze",
        remedy={"optimizer": head_alone},
        remedy_hooks=[At(lambda run: run.unfreeze("0.*") if run.step == 1 else None)],
    ),
    "a module replaced": Remedy(mistake={}, hooks=[At(replaced)], says="change values in place", remedy={}, remedy_hooks=[At(overwritten)]),
    "a rate beside a schedule": Remedy(
        mistake={"schedule": lambda step: 1.0},
        hooks=[At(rate)],
        says="leave the schedule out",
        remedy={},
        remedy_hooks=[At(rate)],
    ),
    "a plateau without evaluations": Remedy(
        mistake=with_plateau(), says=r"ls\.Evaluation\(", remedy=with_plateau(evaluation=ls.Evaluation(data=HELD_OUT, every=1))
    ),
    "a plateau of a metric that is not measured": Remedy(
        mistake={
            "schedule": ls.OnMetric("accuracy", lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)),
            "evaluation": ls.Evaluation(data=HELD_OUT, every=1),
        },
        says="measured are loss; choose one of these",
        remedy={
            "schedule": ls.OnMetric("loss", lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)),
            "evaluation": ls.Evaluation(data=HELD_OUT, every=1),
        },
    ),
    "the average without an average": Remedy(
        mistake={"evaluation": ls.Evaluation(data=HELD_OUT, every=1, weights="average")},
        says=r"give .*hooks=\[ls\.ExponentialMovingAverage",
        remedy={"evaluation": ls.Evaluation(data=HELD_OUT, every=1, weights="average")},
        remedy_hooks=[ls.ExponentialMovingAverage(0.9)],
    ),
    "a buffer that a forward moves": Remedy(
        mistake={"model": factory(Moving), "optimizer": sgd, "loss": squared_error},
        says="self_updating_buffers",
        remedy={"model": factory(Named), "optimizer": sgd},
    ),
    "a batch loss with a weight": Remedy(
        mistake={"loss": None, "batch_loss": GATHERED, "weight": lambda batch: 1.0},
        says="leave out weight",
        remedy={"loss": None, "batch_loss": GATHERED},
    ),
    "batch sizes beside a batch_sampler": Remedy(
        mistake={"batch_sampler": lambda epoch, seed: [[[0, 1], [2, 3]]]},
        says="leave these out",
        remedy={"batch_sampler": lambda epoch, seed: [[[0, 1], [2, 3]]], "global_batch": None, "microbatch": None},
    ),
    "a sampler that draws": Remedy(
        mistake={"sampler": lambda epoch, seed: np.random.default_rng().permutation(48)},
        says="draw from torch's or NumPy's default generators",
        remedy={"sampler": lambda epoch, seed: torch.randperm(48)},
    ),
    "a pattern of no parameter": Remedy(
        mistake={},
        hooks=[At(lambda run: run.freeze("backbone.*"))],
        says=r"it holds 0\.weight",
        remedy={},
        remedy_hooks=[At(lambda run: run.freeze("0.*"))],
    ),
    "a metric named loss": Remedy(
        mistake=lambda: {"evaluation": ls.Evaluation(data=HELD_OUT, metrics={"loss": ls.Mean(errors)})},
        says="choose another",
        remedy={"evaluation": ls.Evaluation(data=HELD_OUT, metrics={"error": ls.Mean(errors)})},
    ),
    "shards of a stream": Remedy(
        mistake={"data": ls.Stream.of(Endless())}, says="write shards=4", remedy={"data": ls.Stream.of(Endless(), shards=4)}
    ),
}


def train(folder: Path, changes: dict[str, Any], hooks: Sequence[ls.Hook]) -> ls.Result:
    changed = {"model": network, "optimizer": adamw, **changes}
    if changed.keys().isdisjoint({"steps", "epochs"}):
        changed["steps"] = 3
    return ls.train(recipe(**changed), hooks=hooks, run_dir=str(folder))


@pytest.mark.parametrize("case", REMEDIES.values(), ids=REMEDIES)
def test_what_an_error_recommends_works(tmp_path: Path, case: Remedy) -> None:
    with pytest.raises(UserError, match=f"(?s){case.says}"):
        train(tmp_path / "mistake", case.mistake() if callable(case.mistake) else case.mistake, case.hooks)
    assert train(tmp_path / "remedy", case.remedy, case.remedy_hooks).steps > 0
