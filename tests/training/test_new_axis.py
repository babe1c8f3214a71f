"""An axis that is added to the plan: one row says all that the package asks about it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from training.subjects import recipe

import lockstep as ls
from lockstep.base.errors import PlanError
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import join
from lockstep.plan import Plan, Size, axis
from lockstep.testing.pool import WorkerPool


@dataclass(frozen=True, kw_only=True, slots=True)
class NewPlan(Plan):
    """A plan with one axis more."""

    islands: Size | None = field(
        default=None,
        metadata=axis("microbatches", same_state=True, in_forward=False, sums="all"),
    )


def train(plan: dict[str, Any], run_dir: str) -> tuple[str, str, float]:
    result = ls.train(replace(recipe(), steps=4), plan=NewPlan(**plan), run_dir=run_dir)
    return result.plan, result.fingerprint, result.loss


def test_an_axis_that_divides_microbatches_trains_the_same_model(
    pool: WorkerPool, tmp_path: Path
) -> None:
    bitwise = {"numerics": "bitwise"}
    (alone,) = pool.run(1, train, {"replicate": 1, **bitwise}, str(tmp_path / "1"))
    for rank in pool.run(2, train, {"islands": 2, **bitwise}, str(tmp_path / "2")):
        assert rank == ("replicate=1,islands=2,numerics=bitwise", *alone[1:])
    for plan in ({"replicate": 2, "islands": 2}, {"shard": 2, "islands": 2}):
        for rank in pool.run(4, train, plan, str(tmp_path / "-".join(plan))):
            torch.testing.assert_close(rank[2], alone[2])


def answers() -> dict[str, Any]:
    """What the mesh says on this rank of `replicate=2,expert=2`."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(minutes=1)
    world = join(rank=rank, size=size, local_rank=rank, local_size=size, timeout=timeout)
    plan = Plan(replicate=2, expert=2, transport="torch").resolve(size)
    mesh = Mesh.of(world, plan)
    assert mesh.torch_mesh is not None
    sums = {}
    for name, placement in {"whole": Replicate(), "expert": Shard(0)}.items():
        parameter = distribute_tensor(torch.ones(4, 2), mesh.torch_mesh["expert"], [placement])
        number = torch.tensor(float(rank))
        mesh.summed(parameter).all_reduce(number)
        sums[name] = number.item()
    mesh.close()
    found = {"data": mesh.data.size, "replicas": mesh.replicas.size, "rounds": plan.has_rounds}
    return {**found, "divided": plan.state_divided, **sums}


def test_the_gradient_of_an_expert_is_not_summed_over_the_axis_that_divides_experts(
    pool: WorkerPool,
) -> None:
    same = {"data": 4, "replicas": 2, "rounds": True, "divided": ["expert=2"], "whole": 6.0}
    assert pool.run(4, answers) == [{**same, "expert": each} for each in (2.0, 4.0, 2.0, 4.0)]


def test_a_new_axis_is_checked_like_the_others() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class WithTokens(Plan):
        tokens: Size | None = field(
            default=None,
            metadata=axis("tokens", same_state=True, in_forward=True, sums="all"),
        )

    assert WithTokens(replicate=2, assignment="measured").replicate == 2
    with pytest.raises(PlanError, match=r"assignment=measured with tokens=2; its ranks compute"):
        WithTokens(replicate=1, tokens=2, assignment="measured")
