"""A predicted step: what is refused, and what it is called."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from planner.subjects import CHANGES, LENGTH, adamw, recipe
from torch import Tensor

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.plan import Plan
from lockstep.planner.machines.costs import Machine, host_costs
from lockstep.planner.machines.hardware import parse_target
from lockstep.planner.predict import is_splittable, predict
from lockstep.planner.prediction import Prediction
from lockstep.planner.tracing.tracer import model_size

MACHINE = Machine.of(parse_target("2 x H100"), None)


@cache
def predicted(plan: str) -> Prediction:
    return predict(recipe(), Plan.parse(plan), MACHINE)


def samples(shard: int, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    assert shard < 8
    words = torch.full((LENGTH,), shard)
    return iter([(words, words)] * 100)


@pytest.mark.parametrize(
    "changes",
    [CHANGES["running statistics"], {"data": ls.Stream(samples, shards=8)}],
    ids=["BatchNorm", "stream"],
)
def test_microbatches_that_a_run_would_not_split_are_not_split(changes: dict[str, Any]) -> None:
    given = recipe(**changes)
    assert not is_splittable(given, model_size(given))
    with pytest.raises(RecipeError, match="microbatch_splits=1; half a microbatch"):
        predict(given, Plan.parse("replicate=2,microbatch_splits=1"), MACHINE)


def test_a_balance_over_microbatches_is_not_split() -> None:
    for over, splits in (("microbatch", False), ("step", True)):
        balance = ls.Balance(coefficient=0.1, over=over)  # type: ignore[arg-type]
        given = recipe(balance=balance, experts=["blocks.*"])
        assert is_splittable(given, model_size(recipe())) == splits


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "tensor=2", "pipeline=2"])
def test_an_eager_step_of_a_small_model_takes_as_long_as_its_host_launches_it(plan: str) -> None:
    found = predicted(plan)
    assert found.limit == "launches"
    assert found.seconds > host_costs().kernel * 4 * 40, (
        "each of 4 microbatches has 40 kernels at least"
    )
    assert found.seconds_with_twice["network"] == pytest.approx(found.seconds, rel=0.05)


def test_distributed_tensors_and_fsdps_hooks_take_the_host_long_and_compiled_code_is_launched_faster() -> (
    None
):
    plans = ("replicate=2", "tensor=2", "shard=2", "replicate=2,compile=yes")
    alone, tensor, shard, compiled = (predicted(plan).seconds for plan in plans)
    assert tensor > 2 * alone
    assert shard > 1.5 * alone
    assert compiled < 0.7 * alone


def test_a_prediction_has_the_plan_as_a_user_writes_it_and_the_parts_of_a_microbatch() -> None:
    found = predict(recipe(), Plan.parse("shard=2,microbatch_splits=1"), MACHINE)
    assert found.plan == "shard=2,microbatch_splits=1"
    assert (found.microbatch, found.microbatches) == (1, 4)


def test_a_stream_has_a_shard_for_each_microbatch_that_is_traced() -> None:
    given = recipe(data=ls.Stream(samples, shards=8), global_batch=8, microbatch=1)
    assert predict(given, Plan.parse("replicate=2"), MACHINE).microbatches == 4


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_memory_of_a_pipeline_is_that_of_all_microbatches(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = recipe(global_batch=20, optimizer=adamw)
    plan = Plan.parse(f"pipeline=2,schedule={schedule}")
    told = predict(given, plan, MACHINE)
    monkeypatch.setattr("lockstep.planner.predict.ROUNDS", 5)
    whole = predict(given, plan, MACHINE)
    assert [each.bytes for each in told.memory] == pytest.approx(
        [each.bytes for each in whole.memory], rel=0.03
    )
