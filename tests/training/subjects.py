"""What the tests of training train: a tiny model on tiny data. At module level, so that workers can
be told their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import run_files
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.base.errors import DataError, UserError
from lockstep.comm.mesh import full_tensor
from lockstep.logging.run_files import CHECKSUM
from lockstep.order import Order

FEATURES = 6
OUTPUTS = 3
DATA_PLANS = {
    "replicate=1": 1,
    "replicate=2": 2,
    "replicate=3": 3,
    "replicate=4": 4,
    "shard=2": 2,
    "shard=3": 3,
    "shard=4": 4,
    "replicate=2,shard=2": 4,
}
"""Plans of the axes that share out microbatches, and the processes that they need."""


def network(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, OUTPUTS))


def rows(samples: int, seed: int = 5) -> TensorDataset:
    """Each sample's own index, its features and its target."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(
        torch.arange(samples), features, torch.randn(samples, OUTPUTS, generator=generator)
    )


def squared_error(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return ((model(batch[1]) - batch[2]) ** 2).mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def recipe(**changes: Any) -> ls.Recipe:
    """Two steps of four microbatches of four samples, changed as asked."""
    given: dict[str, Any] = {
        "model": network,
        "data": rows(48),
        "loss": squared_error,
        "optimizer": adamw,
        "global_batch": 16,
        "microbatch": 4,
        **changes,
    }
    if given.keys().isdisjoint({"steps", "epochs"}):
        given["steps"] = 2
    return ls.Recipe(**given)


def each_of(
    function: Callable[..., Any],
    run_dir: str,
    cases: Iterable[Sequence[Any]],
    *,
    may_refuse: bool = True,
) -> list[Any]:
    """Returns `function(folder, *case)` of each case, in a folder of its own. In place of what a
    case refuses: its error, as "LossError: ...", or raises it unless they `may_refuse`."""
    found = []
    for number, case in enumerate(cases):
        try:
            found.append(function(f"{run_dir}/{number}", *case))
        except UserError as error:
            if not may_refuse:
                raise
            found.append(f"{type(error).__name__}: {error}")
    return found


def samples_at(start: int, stop: int, *, of: int, seed: int = 0) -> list[int]:
    """The samples at positions [start, stop) of the order of `of` samples."""
    return [int(sample) for sample in Order(of, seed).samples(np.arange(start, stop))[1]]


def learned(run_dir: Path | str) -> list[dict[str, float]]:
    """The numbers in the rows of metrics.jsonl without what was measured of time and memory, which
    differs from run to run."""
    measured = {"time", "samples_per_second", "weight_per_second", "memory_bytes", "mfu", CHECKSUM}
    rows = run_files.metrics(run_dir)
    return [{name: value for name, value in row.items() if name not in measured} for row in rows]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(value.detach()).clone() for name, value in model.state_dict().items()}


def same(one: Any, other: Any) -> bool:
    """Whether two nests of tensors and numbers have the same bits."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


Trained = tuple[dict[str, Tensor], list[float]]
"""The state dict of a trained model, and its losses and metrics."""


def off(found: Trained, expected: Trained) -> float:
    """Return the largest relative difference; NaN if any is."""
    (state, numbers), (state_of_one, numbers_of_one) = found, expected
    each = [
        float((state[name] - value).norm() / value.norm()) for name, value in state_of_one.items()
    ]
    pairs = zip(numbers, numbers_of_one, strict=True)
    each += [abs(one - other) / abs(other) for one, other in pairs]
    return float(torch.tensor(each, dtype=torch.float64).max())  # not Python's, which hides NaN


class LastState(ls.Hook):
    """Keeps the trained model's state dict."""

    def on_finish(self, run: Any) -> None:
        self.state = state_of(run.model)


class EachState(ls.Hook):
    """Keeps the model's state dict before the first step and after each."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_start(self, run: Any) -> None:
        self.states.append(state_of(run.model))

    after_step = on_start


class FullState(ls.Hook):
    """Keeps the trained model's state dict, also under a pipeline."""

    def on_finish(self, run: Any) -> None:
        self.state = {name: each.clone() for name, each in run.full_state_dict().items()}


class Fails(ls.Hook):
    """Ends the run after a step."""

    def __init__(self, step: int = 3) -> None:
        self.step = step

    def after_step(self, run: Any) -> None:
        if run.step == self.step:
            raise DataError("a step too far")


class Scores(ls.Hook):
    """Adds a metric `place` to evaluations, by step; 9 for other steps."""

    def __init__(self, values: Mapping[int, float]) -> None:
        self.values = values

    def after_evaluation(self, run: Any, metrics: Any) -> None:
        metrics["place"] = self.values.get(run.step, 9.0)
