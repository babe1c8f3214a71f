"""Optimizers and comparisons of experts that are on several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from training.subjects import LastState, Trained, each_of, off
from training.test_expert_axis import recipe

import lockstep as ls
from lockstep.base.errors import DivergenceError
from lockstep.comm.mesh import to_local
from lockstep.testing.pool import WorkerPool

Optimizers = Callable[[nn.Module], Optimizer | list[Optimizer]]


class PerExpert(torch.optim.SGD):
    """Divides the gradient of each matrix of a stack by its norm."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 3:
                    parameter.grad /= parameter.grad.norm(dim=(1, 2), keepdim=True) + 0.1
        return super().step(closure)


class PerTensor(torch.optim.SGD):
    """Divides each gradient by its norm: of all experts together."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm() + 0.1
        return super().step(closure)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def fused(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def muon(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices outside of experts, AdamW for the rest."""
    named = dict(model.named_parameters())
    matrices = {
        name for name, each in named.items() if name.endswith(("qkv.weight", "router.weight"))
    }
    rest = [each for name, each in named.items() if name not in matrices]
    return [
        torch.optim.Muon([named[name] for name in sorted(matrices)], lr=1e-3),
        torch.optim.AdamW(rest, lr=1e-2),
    ]


def per_expert(model: nn.Module) -> Optimizer:
    return PerExpert(model.parameters(), lr=0.05, momentum=0.9)


def per_tensor(model: nn.Module) -> Optimizer:
    return PerTensor(model.parameters(), lr=0.05, momentum=0.9)


OPTIMIZERS: list[Optimizers] = [adamw, fused, muon, per_expert, per_tensor]
WHOLE = {
    ("expert=2", "per_tensor"),
    *(("shard=2,expert=2", name) for name in ("muon", "per_tensor")),
}
"""Plans and optimizers that step on gathered tensors."""


def train(folder: str, plan: str, optimizer: Optimizers) -> tuple[Trained, bool]:
    last = LastState()
    result = ls.train(
        recipe(optimizer=optimizer, evaluation=None, steps=2),
        plan=plan,
        run_dir=folder,
        hooks=[last],
        log_every=1,
    )
    events = Path(folder, "events.jsonl").read_text()
    return (last.state, [result.loss]), "optimizer-on-whole-tensors" in events


def train_each(folder: str, plan: str) -> list[Any]:
    return each_of(train, folder, [(plan, optimizer) for optimizer in OPTIMIZERS], may_refuse=False)


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Any]:
    (found,) = pool.run(1, train_each, str(tmp_path_factory.mktemp("alone")), "replicate=1")
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "plan", ["expert=2", pytest.param("shard=2,expert=2", marks=pytest.mark.slow)]
)
def test_each_optimizer_does_what_it_does_on_one_process(
    pool: WorkerPool, tmp_path: Path, alone: Sequence[Any], plan: str
) -> None:
    size = math.prod(int(axis[-1]) for axis in plan.split(","))
    for rank in pool.run(size, train_each, str(tmp_path), plan):
        for optimizer, (found, is_whole), (expected, _) in zip(
            OPTIMIZERS, rank, alone, strict=True
        ):
            name = optimizer.__name__
            # Muon computes in bf16
            assert off(found, expected) < (1e-2 if name == "muon" else 1e-11), name
            assert is_whole == ((plan, name) in WHOLE), name


class Flip(ls.Hook):
    """One bit of a parameter on one rank, after a step."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name

    def after_step(self, run: Any) -> None:
        if run.step == 3 and run.context.world.rank == self.rank:
            tensor = to_local(run.model.get_parameter(self.name).detach())
            tensor.view(-1).view(torch.int64)[0] ^= 1 << 50


def flipped(folder: str, plan: str, rank: int, name: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_COMPARE_EVERY", "2")
        try:
            given = recipe(evaluation=None, steps=4)
            ls.train(given, plan=plan, run_dir=folder, hooks=[Flip(rank, name)])
        except DivergenceError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("plan", "name", "who"),
    [
        ("expert=2", "head.weight", "ranks 0, 1 have 2 different values of 0/model/"),
        pytest.param(
            "replicate=2,expert=2",
            "blocks.1.experts.up",
            "ranks 1, 3 have 2 different values of 0/model/",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_copies_of_a_parameter_are_compared_over_all_ranks_that_have_them(
    pool: WorkerPool, tmp_path: Path, plan: str, name: str, who: str
) -> None:
    size = math.prod(int(axis[-1]) for axis in plan.split(","))
    said = set(pool.run(size, flipped, str(tmp_path), plan, size - 1, name))
    assert len(said) == 1
    assert f"after step 4, and were the same after step 2: {who}{name}" in said.pop()
