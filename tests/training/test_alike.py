"""A factory that builds another model on each rank is refused on every rank, also where no rank
builds the whole of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiers import tiered
from torch import Tensor, nn
from training.subjects import FEATURES, OUTPUTS, each_of, recipe

from lockstep import train
from lockstep.testing.pool import WorkerPool

PLANS = {"shard=2": 2, "tensor=2": 2, "pipeline=2": 2, "replicate=2,pipeline=2": 4}
"""And the processes that they need."""


def rank() -> int:
    return int(os.environ["RANK"])


class Body(nn.Module):
    def __init__(self, width: int = FEATURES, layers: int = 1) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(FEATURES, 2 * width), nn.BatchNorm1d(2 * width)
        self.down = nn.Sequential(
            *(nn.Linear(2 * width, 2 * width) for _ in range(layers)),
            nn.Linear(2 * width, FEATURES),
        )
        self.register_buffer("table", torch.ones(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).relu()) * self.table


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.out = weight, nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x @ self.weight)


class Model(nn.Sequential):
    """Its first and its last part share a parameter where they are `tied`."""

    def __init__(self, *, tied: bool = True, **body: int) -> None:
        first = nn.Linear(FEATURES, FEATURES)
        last = Head(first.weight if tied else nn.Parameter(torch.eye(FEATURES)))
        super().__init__(first, Body(**body), nn.Identity(), Body(), last)


def right() -> nn.Module:
    return Model()


def right_but_whole() -> nn.Module:
    """A factory that needs values, on one rank alone."""
    model = Model()
    if rank() == 1:
        model[0].weight.detach().numpy()
    return model


def changed(name: str, change: Callable[[Tensor], object]) -> nn.Module:
    model = Model(tied=False)
    with torch.no_grad():
        change(dict([*model.named_parameters(), *model.named_buffers()])[name])
    return model


def other_weight() -> nn.Module:
    return changed("0.weight", lambda weight: weight.add_(rank()))


def other_weight_in_the_middle() -> nn.Module:
    return changed("3.up.weight", lambda weight: weight[1, 2].fill_(rank()))


def other_last_bias() -> nn.Module:
    return changed("4.out.bias", lambda bias: bias.mul_(1 + rank()))


def other_table() -> nn.Module:
    return changed("1.table", lambda table: table.copy_(torch.full((FEATURES,), float(rank()))))


def other_statistics() -> nn.Module:
    return changed("3.norm.running_mean", lambda mean: mean.fill_(rank()))


def unseeded() -> nn.Module:
    numbers = np.random.default_rng()  # of the operating system's
    return changed("0.bias", lambda bias: bias.copy_(torch.from_numpy(numbers.random(FEATURES))))


def unseeded_and_tied() -> nn.Module:
    model = Model()
    with torch.no_grad():
        model[4].weight.normal_(generator=torch.Generator().manual_seed(rank()))
    return model


def deeper() -> nn.Module:
    return Model(layers=1 + rank())


def shallower() -> nn.Module:
    return Model(layers=5 - rank())


def wider() -> nn.Module:
    return Model(width=FEATURES + rank())


def with_another_buffer() -> nn.Module:
    model = Model()
    if rank() == 1:
        model[1].register_buffer("counter", torch.zeros(2))
    return model


def tied_on_one_rank() -> nn.Module:
    return Model(tied=rank() == 0)


def frozen_on_one_rank() -> nn.Module:
    model = Model()
    model[3].up.bias.requires_grad_(rank() == 0)
    return model


def in_another_order() -> nn.Module:
    model = Model()
    names = list(model[1]._modules)
    model[1]._modules = {
        name: model[1]._modules[name] for name in (names if rank() == 0 else names[::-1])
    }
    return model


def another_part() -> nn.Module:
    return Model() if rank() == 0 else Model().append(nn.Identity())


def another_class() -> nn.Module:
    return Model() if rank() == 0 else nn.Sequential(*Model())


def whole_on_one_rank_and_other() -> nn.Module:
    model = right_but_whole()
    with torch.no_grad():
        model[0].bias.fill_(rank())
    return model


def form(role: str, shape: tuple[int, ...]) -> str:
    return (
        f"a {role}, torch.float32 of shape {shape}, strides"
        f" {(shape[1], 1) if len(shape) > 1 else (1,)}"
    )


VALUES = "has other values"
PLACE = "is at another place"
DIFFERENT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "'0.weight'": (other_weight, VALUES),
    "'3.up.weight'": (other_weight_in_the_middle, VALUES),
    "'4.out.bias'": (other_last_bias, VALUES),
    "'1.table'": (other_table, VALUES),
    "'3.norm.running_mean'": (other_statistics, VALUES),
    "'0.bias'": (unseeded, VALUES),
    "'0.weight' (tied)": (unseeded_and_tied, VALUES),
    "'1.down.1.weight'": (
        deeper,
        f"is {form('parameter', (6, 12))} on one and {form('parameter', (12, 12))} on the other",
    ),
    "'1.down.5'": (shallower, "is Linear on one and missing on the other"),
    "'1.up.weight'": (
        wider,
        f"is {form('parameter', (12, 6))} on one and {form('parameter', (14, 6))} on the other",
    ),
    "'1.counter'": (
        with_another_buffer,
        f"is missing on one and {form('buffer', (2,))} on the other",
    ),
    "'4.weight'": (
        tied_on_one_rank,
        f"is missing on one and {form('parameter', (6, 6))} on the other",
    ),
    "'3.up.bias'": (
        frozen_on_one_rank,
        f"is {form('parameter', (12,))} on one and {form('frozen parameter', (12,))} on the other",
    ),
    "'1.up'": (in_another_order, PLACE),
    "'5'": (another_part, "is missing on one and Identity on the other"),
    "it": (another_class, "is Model on one and Sequential on the other"),
    "'0.bias' (whole)": (whole_on_one_rank_and_other, VALUES),
}
"""By what the error names, and what it says of it."""


def inputs(batch: Sequence[Tensor]) -> Tensor:
    return batch[1]


def squared(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return (output - batch[2]).square().mean()


def attempt(run_dir: str, plan: str, factory: Callable[[], nn.Module]) -> str:
    styles: dict[str, Any] = {"tensor": {"*.up": "colwise_gathered"}} if "tensor" in plan else {}
    given = recipe(model=factory, inputs=inputs, loss=squared, **styles)
    return train(given, plan=plan, run_dir=run_dir).fingerprint


def names(plan: str) -> list[str]:
    """All under shard, every third under the other plans."""
    return list(DIFFERENT)[:: 1 if plan == "shard=2" else 3]


def attempts(run_dir: str, plan: str) -> list[str]:
    """What came of training each of these models, and one model on all ranks."""
    factories = [*(DIFFERENT[name][0] for name in names(plan)), right, right_but_whole]
    return each_of(attempt, run_dir, [(plan, factory) for factory in factories])


@pytest.mark.parametrize("plan", tiered(PLANS))
def test_a_model_of_its_own_on_each_rank_is_refused_on_all_alike(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    """And one model on all ranks is trained, also where one rank alone cannot defer it."""
    *everyone, one, whole = zip(*pool.run(PLANS[plan], attempts, str(tmp_path), plan), strict=True)
    for name, said in zip(names(plan), everyone, strict=True):
        assert len(set(said)) == 1, name
        start = "RecipeError: the model is not the same on ranks "
        rule = "; the factory must build the same model in every process, "
        assert said[0].startswith(start), said[0]
        found = said[0].removeprefix(start).partition(": ")[2].partition(rule)
        assert found[:2] == (f"{name.split(' (')[0]} {DIFFERENT[name][1]}", rule), name
    (fingerprint,) = {*one, *whole}
    assert len(fingerprint) == 64


TOLD = {"LOCKSTEP_CHECK": "1", "LOCKSTEP_PLAN": "shard=2", "LOCKSTEP_COMPARE_EVERY": "1"}


def train_told(run_dir: str, name: str) -> None:
    """Rank 1 is told so, as torchrun's user may do by mistake."""
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setenv(name, TOLD[name])
        train(recipe(), run_dir=run_dir)


def train_told_each(run_dir: str) -> list[str]:
    return each_of(train_told, run_dir, [(name,) for name in TOLD])


def test_processes_that_were_told_otherwise_are_refused_alike(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for name, first, second in zip(
        TOLD, *pool.run(2, train_told_each, str(tmp_path / "run")), strict=True
    ):
        assert first == second, name
        assert first.startswith(f"LaunchError: {name} is "), first
        assert " for rank 0 and " in first, name
        assert "; set it for all of them" in first, first
    assert not (tmp_path / "run").exists()
