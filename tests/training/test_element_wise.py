"""Optimizers that need whole tensors are found by a trial, and refused where a plan cuts tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training.subjects import OUTPUTS, recipe

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.testing.pool import WorkerPool
from lockstep.training.optim.element_wise import is_element_wise

ELEMENT_WISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(7, 12))]


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_torchs_element_wise_optimizers_are_known_as_such(name: str) -> None:
    optimizer = getattr(torch.optim, name)([*matrix(), nn.Parameter(torch.ones(5))], lr=0.01)
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    assert is_element_wise(optimizer)
    assert {parameter: dict(state) for parameter, state in optimizer.state.items()} == before


@pytest.mark.parametrize("options", [{"fused": True}, {"lr": 0.0}, {"lr": torch.tensor(0.01)}, {"weight_decay": 0.1, "amsgrad": True}])
def test_the_settings_of_an_element_wise_optimizer_do_not_matter(options: dict[str, Any]) -> None:
    assert is_element_wise(torch.optim.AdamW(matrix(), **options))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.optim.Muon(matrix()),
        lambda: torch.optim.Muon(matrix(), lr=0.0),
        lambda: torch.optim.Adafactor(matrix()),
    ],
)
def test_optimizers_that_see_the_whole_matrix_are_found(make: Callable[[], torch.optim.Optimizer]) -> None:
    assert not is_element_wise(make())


class Normalized(torch.optim.SGD):
    """Divides each gradient by its norm, as LARS and LAMB do in their ways."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


def test_the_norm_of_a_vector_is_found() -> None:
    assert not is_element_wise(Normalized([nn.Parameter(torch.ones(5))], lr=0.1))


def no_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, OUTPUTS, bias=False))


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(model.parameters(), lr=0.02)


def train(run_dir: str, plan: str) -> str:
    return ls.train(recipe(model=no_bias, optimizer=muon), run_dir=run_dir, plan=plan).fingerprint


@pytest.mark.parametrize("numerics", ["fast", "bitwise"])
def test_muon_is_refused_on_shards(pool: WorkerPool, tmp_path: Path, numerics: str) -> None:
    with pytest.raises(RecipeError) as caught:
        pool.run(2, train, str(tmp_path / "run"), f"shard=2,numerics={numerics}")
    assert str(caught.value) == (
        "Muon with shard=2; its update of an element depends on the other elements of the tensor, and each rank has a part of each "
        "tensor; use replicate, or an optimizer that updates each element by itself, such as AdamW"
    )


def test_muon_trains_the_same_model_on_replicas(pool: WorkerPool, tmp_path: Path) -> None:
    (alone,) = pool.run(1, train, str(tmp_path / "alone"), "numerics=bitwise")
    assert pool.run(2, train, str(tmp_path / "run"), "replicate=2,numerics=bitwise") == [alone, alone]
