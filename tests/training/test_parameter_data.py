"""Values that a script gives a parameter between two steps: in place, or by `parameter.data`, which
shards ignore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from training.subjects import recipe

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.testing.pool import WorkerPool


def halves(parameter: Tensor) -> Tensor:
    return torch.full(tuple(parameter.shape), 0.5)


def split_as(parameter: Tensor, value: Tensor) -> Tensor:
    return (
        distribute_tensor(value, parameter.device_mesh, parameter.placements)
        if isinstance(parameter, DTensor)
        else value
    )


def by_data(parameter: Tensor) -> None:
    parameter.data = halves(parameter)


def by_split_data(parameter: Tensor) -> None:
    parameter.data = split_as(parameter, halves(parameter))


@torch.no_grad()
def by_whole_tensor(parameter: Tensor) -> None:
    parameter.copy_(split_as(parameter, halves(parameter)))


@torch.no_grad()
def by_parameter(parameter: Tensor) -> None:
    parameter.copy_(parameter * 0.0 + 0.5)


def by_data_in_place(parameter: Tensor) -> None:
    parameter.data.fill_(0.5)


IN_PLACE: tuple[Callable[[Tensor], None], ...] = (by_whole_tensor, by_parameter, by_data_in_place)


class Moves(ls.Hook):
    def __init__(self, how: Callable[[Tensor], None]) -> None:
        self.how = how

    def after_step(self, run: Any) -> None:
        if run.step == 1:
            self.how(run.model[2].weight)


def train(folder: str, plan: str, *ways: Callable[[Tensor], None]) -> list[str]:
    """The fingerprint, or the error, of each."""
    found = []
    for how in ways:
        try:
            result = ls.train(
                recipe(steps=3),
                plan=f"{plan},numerics=bitwise",
                run_dir=f"{folder}/{plan}/{how.__name__}",
                hooks=[Moves(how)],
            )
            found.append(result.fingerprint)
        except RecipeError as error:
            found.append(str(error))
    return found


def test_values_take_effect_or_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    (alone,) = pool.run(1, train, str(tmp_path), "replicate=1", by_data, by_split_data, *IN_PLACE)
    right = alone[0]
    assert set(alone) == {right}
    for found in pool.run(
        2, train, str(tmp_path), "replicate=2", by_data, by_split_data, *IN_PLACE
    ):
        assert set(found) == {right}
    for refused, split, *in_place in pool.run(
        2, train, str(tmp_path), "shard=2", by_data, by_split_data, *IN_PLACE
    ):
        assert refused.startswith(
            "parameter '2.weight' was given other values by parameter.data = value, which has"
            " no effect"
        )
        assert split == refused
        assert set(in_place) == {right}


def test_a_tensor_parallel_plan_refuses_it_too(pool: WorkerPool, tmp_path: Path) -> None:
    for (refused,) in pool.run(2, train_in_tensor, str(tmp_path), by_data):
        assert refused.startswith(
            "parameter '2.weight' was given other values by parameter.data = value"
        )


def train_in_tensor(folder: str, how: Callable[[Tensor], None]) -> list[str]:
    given = recipe(steps=3, tensor={"0": "colwise", "2": "rowwise"})
    with pytest.raises(RecipeError) as caught:
        ls.train(given, plan="tensor=2", run_dir=f"{folder}/tensor", hooks=[Moves(how)])
    return [str(caught.value)]
