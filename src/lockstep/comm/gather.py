"""Gathers over ranks for loops of one's own: rows with a gradient, and the mean of values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.world import World, exact_sum


def gather(rows: Tensor, world: World) -> Tensor:
    """Return the rows of all ranks in rank order; see `Session.gather`. Every rank calls it."""
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
    """Return the exact mean over all values (any shape) of all ranks; NaN if there are none. Every
    rank calls it."""
    everyone = world.gather_ragged(values.detach().reshape(-1).double().cpu())
    return exact_sum(everyone.tolist()) / len(everyone) if len(everyone) else math.nan
