"""Computes the matrix products of a sharded layer in a fixed number of slices of its features. The
bits are the same if the number of ranks divides the number of slices. Each slice has one matrix
product in the forward and two matrix products in the backward. All tensors are contiguous and
aligned, so the BLAS library gets the same calls on one rank and on eight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.base.torch_private import unsafe_view
from lockstep.comm.ordered_sum import OrderedSum, TreeNodes
from lockstep.comm.world import World
from lockstep.model.tensor.elementwise import aligned, aligned_gradient


@dataclass(frozen=True, slots=True)
class Slices:
    """The number of equal pieces in which each sharded layer is computed, and the ranks that share
    the pieces."""

    count: int
    """The number of slices over all ranks, a power of two."""
    ranks: World

    @property
    def own(self) -> int:
        return self.count // self.ranks.size

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        return self.sum_over_ranks(tree_sum(parts))

    def sum_over_ranks(self, node: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, added in a binary tree. Every rank must call this
        method."""
        if self.ranks.size == 1:
            return node
        each_one = [range(rank, rank + 1) for rank in range(self.ranks.size)]
        ordered = OrderedSum([node.reshape(-1)], TreeNodes.of(each_one), self.ranks)
        ordered.start(node.numel(), node)
        ordered.fold()
        return ordered.finish().view(node.shape)


def linear(
    given: Tensor, weight: Tensor, bias: Tensor | None, slices: Slices, *, over: str
) -> Tensor:
    """Return `F.linear(given, weight, bias)`. Every rank must call this function with its shards of
    the tensors. `over` says if the weight is sharded along the outputs or along the inputs."""
    given, weight = _cast(given), _cast(weight)
    bias = None if bias is None else _cast(bias)
    product: Any = _OverOutputs if over == "outputs" else _OverInputs
    rows = given.reshape(-1, given.shape[-1])
    with torch.autocast(given.device.type, enabled=False):
        out: Tensor = product.apply(rows, weight, bias, slices)
    shaped: Tensor = unsafe_view(out, (*given.shape[:-1], out.shape[-1]))
    return shaped


def of_heads(
    compute: Callable[..., Tensor], tensors: Sequence[Tensor], dim: int, slices: Slices
) -> Tensor:
    """Compute slices of heads one at a time, because the bits of a product depend on the number of
    heads."""
    pieces = math.gcd(slices.own, *(each.shape[dim] for each in tensors))
    cut = [_cut(tensor, dim, pieces) for tensor in tensors]
    return torch.cat([aligned_gradient(compute(*each)) for each in zip(*cut, strict=True)], dim)


def _cast(tensor: Tensor) -> Tensor:
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


class _OverOutputs(torch.autograd.Function):
    """A linear layer in slices of its outputs. The gradient of the input is a sum over the
    slices."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, slices: Slices
    ) -> Tensor:
        given = aligned(given)
        ctx.save_for_backward(given, weight)
        ctx.slices, ctx.has_bias = slices, bias is not None
        weights = _rows(weight, slices.own)
        if bias is None:
            return torch.cat([given @ each.t() for each in weights], 1)
        biases = bias.chunk(slices.own)
        return torch.cat(
            [torch.addmm(b, given, each.t()) for b, each in zip(biases, weights, strict=True)], 1
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        given, weight = ctx.saved_tensors
        wants_input, wants_weight, _, _ = ctx.needs_input_grad
        slices = ctx.slices
        with torch.autocast(given.device.type, enabled=False):
            each_slope = _columns(gradients[0], slices.own)
            of_given = of_weight = of_bias = None
            if wants_input:
                pairs = zip(each_slope, _rows(weight, slices.own), strict=True)
                of_given = slices.sum([_wide(slope, each) for slope, each in pairs]).to(given.dtype)
            if wants_weight:
                of_weight = torch.cat([slope.t() @ given for slope in each_slope])
            if ctx.has_bias:
                of_bias = torch.cat([slope.sum(0) for slope in each_slope])
        return of_given, of_weight, of_bias, None


class _OverInputs(torch.autograd.Function):
    """A linear layer in slices of its inputs. The output is the sum of the slices' products, plus
    the bias."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, slices: Slices
    ) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.slices, ctx.has_bias = slices, bias is not None
        pairs = zip(_columns(given, slices.own), _columns(weight, slices.own), strict=True)
        out = slices.sum([_wide(own, each.t()) for own, each in pairs])
        return (out if bias is None else out + bias).to(given.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        given, weight = ctx.saved_tensors
        wants_input, wants_weight, _, _ = ctx.needs_input_grad
        own = ctx.slices.own
        with torch.autocast(given.device.type, enabled=False):
            slope = aligned(gradients[0])
            of_given = of_weight = of_bias = None
            if wants_input:
                of_given = torch.cat([slope @ each for each in _columns(weight, own)], 1)
            if wants_weight:
                of_weight = torch.cat([slope.t() @ each for each in _columns(given, own)], 1)
            if ctx.has_bias:
                of_bias = slope.sum(0)
        return of_given, of_weight, of_bias, None


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Add 2^k tensors in a binary tree. The function does not write to `parts`, because activation
    checkpointing may keep them."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _rows(matrix: Tensor, count: int) -> list[Tensor]:
    return [aligned(each) for each in matrix.chunk(count)]


def _columns(matrix: Tensor, count: int) -> list[Tensor]:
    return _cut(matrix, 1, count)


def _cut(tensor: Tensor, dim: int, pieces: int) -> list[Tensor]:
    cut: Tensor = tensor.unflatten(dim, (pieces, -1))  # type: ignore[no-untyped-call]
    return [aligned(each) for each in cut.movedim(dim, 0).contiguous()]


def _wide(left: Tensor, right: Tensor) -> Tensor:
    if left.dtype not in (torch.bfloat16, torch.float16):
        return left @ right
    if left.is_cpu:
        return left.float() @ right.float()
    return torch.mm(left, right, out_dtype=torch.float32)
