"""Gradients of experts that are divided over ranks: over whom they are summed, and what the norm,
optimizers and checkpoints make of them. The experts of a rank compute that rank's rows here: no
token is exchanged."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep.assignment import MicrobatchAssignment
from lockstep.checkpoint.tensor_shards import TensorShard, check_cover, local_shards
from lockstep.comm.mesh import Mesh, full_tensor, to_local
from lockstep.comm.world import join
from lockstep.model.shard import shard
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool
from lockstep.training.optim.gradient_norm import GradientNorm
from lockstep.training.reducers.agreement import StepAgreement
from lockstep.training.reducers.reducer import build_reducer, choose_reducer

EXPERTS, WIDTH, ROWS = 4, 6, 8


class Experts(nn.Module):
    """Experts that this rank has; each computes all rows, as if they had been sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, 1, WIDTH))

    def forward(self, x: Tensor, mine: slice = slice(None)) -> Tensor:
        weight, bias = (
            each.to_local() if isinstance(each, DTensor) else each[mine]
            for each in (self.weight, self.bias)
        )
        return torch.matmul(x, weight) + bias


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()

    def forward(self, x: Tensor, mine: slice = slice(None)) -> Tensor:
        return self.experts(torch.tanh(self.dense(x)), mine).square().sum()  # type: ignore[no-any-return]


def mixture() -> Mixture:
    torch.manual_seed(0)
    return Mixture().double()


def rows(microbatch: int, context: int, contexts: int) -> Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    drawn = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return drawn[context::contexts]


def assignment_of(plan: Plan) -> MicrobatchAssignment:
    return MicrobatchAssignment(plan.data_ranks, round_robin=True)


def mesh_of(plan: Plan) -> Mesh:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(minutes=1)
    world = join(rank=rank, size=size, local_rank=rank, local_size=size, timeout=timeout)
    return Mesh.of(world, plan.resolve(size))


def divided(mesh: Mesh) -> Mixture:
    """The mixture as the plan lays it out on this rank."""
    model = mixture()
    assert mesh.expert_mesh is not None
    has_axis = mesh.axis("expert").size > 1
    for name, parameter in list(model.experts.named_parameters()) if has_axis else ():
        placed = distribute_tensor(
            parameter.detach(), mesh.expert_mesh["expert"], [Shard(0)], src_data_rank=None
        )
        setattr(model.experts, name, nn.Parameter(placed))
    if mesh.shards().size > 1:
        shard(
            model,
            mesh,
            [],
            experts=["experts"] if has_axis else [],
            free_after_forward=True,
            offload=False,
            materialize=lambda module: None,
            short=None,
            keep_casts=True,
        )
    return model


def step(text: str, count: int) -> dict[str, Any]:
    """Accumulate and reduce the gradients of `count` microbatches on this rank."""
    plan = Plan.parse(text)
    mesh = mesh_of(plan)
    model = divided(mesh)
    parameters = dict(model.named_parameters())
    reducer = build_reducer(
        choose_reducer(mesh, bitwise=False, compressed=False),
        model,
        list(parameters.values()),
        mesh,
        bitwise=False,
        max_microbatches=count,
        compression=None,
        complete=None,
        leaves=[],
        part_leaves=[],
        pipeline=None,
        agreement=StepAgreement(mesh.summed()),
    )
    assignment, tokens = assignment_of(plan), mesh.tokens
    reducer.begin_step(count, assignment)
    totals = []
    for microbatch, is_dummy in assignment.with_dummies(count, mesh.data.rank):
        total = model(rows(microbatch, tokens.rank, tokens.size))
        reducer.backward(
            total, torch.ones_like(total), own_parameters_only=False, is_dummy=is_dummy
        )
        totals += [] if is_dummy else [total.item()]
    stats = reducer.reduce(totals, None, flag=False)
    gradients = [parameter.grad for parameter in parameters.values()]
    norm = GradientNorm(mesh, bitwise=False)
    found = {
        "gradients": {
            name: full_tensor(each) for name, each in zip(parameters, gradients, strict=True)
        },
        "norms": [norm.of(gradients), norm.check(gradients)],
        "norm of each": norm.of_each(gradients),
        "elements": {name: to_local(each).numel() for name, each in parameters.items()},
        "shards": [each.to_json() for each in local_shards(model.state_dict()).values()],
        "values": {name: full_tensor(each.detach()) for name, each in parameters.items()},
        "used": stats.used,
        "total": sum(stats.values),
    }
    reducer.close()
    mesh.close()
    return found


def passes(plan: Plan, count: int) -> Iterator[tuple[Tensor, slice, bool]]:
    """The rows, the experts and the kind of each backward of the step, of all ranks."""
    sizes = {axis.name: plan.size(axis) for axis in plan.axes()}
    held = EXPERTS // sizes["expert"]
    assignment = assignment_of(plan)
    for rank in range(plan.data_ranks):
        first = rank % sizes["expert"] * held
        for microbatch, is_dummy in assignment.with_dummies(count, rank):
            for context in range(sizes["context"]):
                given = rows(microbatch, context, sizes["context"])
                yield given, slice(first, first + held), is_dummy


PLANS = [
    "expert=2",
    "replicate=2,expert=2",
    "shard=2,expert=2",
    "expert=2,context=2",
    "shard=2,context=2",
    pytest.param("shard=2,expert=2,context=2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("text", PLANS)
def test_an_expert_s_gradient_is_summed_over_all_axes_but_its_own(
    text: str, pool: WorkerPool
) -> None:
    """With dummies: their gradient of the dense layers is discarded, and the experts' is kept."""
    size = math.prod(int(part.split("=")[1]) for part in text.split(","))
    plan = Plan.parse(text).resolve(size)
    count = plan.data_ranks + 1
    sizes = {axis.name: plan.size(axis) for axis in plan.axes()}
    model, whole = mixture(), mixture()
    total = 0.0
    for given, mine, is_dummy in passes(plan, count):
        model.zero_grad()
        loss = model(given, mine)
        loss.backward()
        total += 0.0 if is_dummy else loss.item()
        for (name, parameter), sum_of in zip(
            model.named_parameters(), whole.parameters(), strict=True
        ):
            assert parameter.grad is not None
            is_divided = sizes["expert"] > 1 and name.startswith("experts.")
            if is_divided or not is_dummy:
                gradient = parameter.grad
                sum_of.grad = gradient if sum_of.grad is None else sum_of.grad + gradient
            parameter.grad = None
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    norm = torch.stack([each.norm() for each in gradients.values() if each is not None]).norm()
    close: Any = partial(torch.testing.assert_close, rtol=1e-13, atol=1e-13)
    with nullcontext(pool) if size <= 4 else WorkerPool(max_workers=size) as workers:
        ranks = workers.run(size, step, text, count)
    for found in ranks:
        close(found["gradients"], gradients)
        close(torch.tensor(found["norms"], dtype=torch.float64), norm.expand(2))
        close(
            found["norm of each"],
            [each.norm().item() for each in gradients.values() if each is not None],
        )
        close(found["values"], {name: each.detach() for name, each in whole.named_parameters()})
        assert min(found["used"]) > 0
        assert found["total"] == pytest.approx(total)
    check_cover(TensorShard.from_json(each) for found in ranks for each in found["shards"])
    # parameters are sharded over all ranks whose forwards gather them
    shards = sizes["shard"] * sizes["context"] if sizes["shard"] > 1 else 1
    for name, parameter in whole.named_parameters():
        parts = sizes["expert"] * shards if name.startswith("experts.") or shards > 1 else 1
        held = sum(found["elements"][name] for found in ranks)
        assert held == parameter.numel() * size // parts
