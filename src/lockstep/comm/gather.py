"""Gathers rows of all ranks, with gradients or in the order of microbatches or samples, and
computes means over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.assignment import MicrobatchAssignment
from lockstep.base import accelerator
from lockstep.comm.world import World, exact_sum


def gather(rows: Tensor, world: World) -> Tensor:
    """All-gather rows. Gradients flow back to the rank of each row. Every rank must call this
    function."""
    gathered: Tensor = _Gather.apply(rows, world)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World) -> Tensor:
        counts = world.gather_values(len(rows))
        ctx.start, ctx.count, ctx.world = sum(counts[: world.rank]), len(rows), world
        return world.gather_rows(rows.contiguous(), counts).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.world.all_reduce(summed)
        return summed[ctx.start : ctx.start + ctx.count], None


def mean(values: Tensor, world: World) -> float:
    """Return the exact mean of all ranks' values. NaN if there are no values. Every rank must call
    this function."""
    everyone = world.gather_ragged(values.detach().reshape(-1).double().cpu())
    return exact_sum(everyone.tolist()) / len(everyone) if len(everyone) else math.nan


def in_order(rows: Tensor, count: int, assignment: MicrobatchAssignment, data: World) -> Tensor:
    """All-gather one row per microbatch, in the order of the `count` microbatches of a step."""
    everyone = data.gather_rows(rows, [len(share) for share in assignment.indices_by_rank(count)])
    if not assignment.round_robin:
        return everyone
    positions = torch.tensor(assignment.gathered_positions(count))
    if accelerator.has_streams(everyone.device):
        positions = positions.pin_memory().to(everyone.device, non_blocking=True)
    return everyone[positions.to(everyone.device)]


def samples_in_order(
    rows: Tensor | None, sizes: Sequence[int], assignment: MicrobatchAssignment, data: World
) -> Tensor:
    """All-gather one row per sample on the CPU, in the order of the samples. `sizes` has the number
    of samples in each microbatch."""
    everyone = data.gather_ragged(rows)
    if not assignment.round_robin:
        return everyone
    shares = assignment.indices_by_rank(len(sizes))
    parts = torch.split(everyone, [sizes[index] for share in shares for index in share])
    return torch.cat([parts[position] for position in assignment.gathered_positions(len(sizes))])
