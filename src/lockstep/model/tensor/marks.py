"""Marks of plain tensors in a model with sharded layers. A mark says that the tensor is a shard of
the features or heads, or that it holds random numbers whose shape may be a shard's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.base.torch_private import tree_leaves

MARK = "_lockstep_mark"
ONE = -1
"""Stands for the dim of a shard of one head or feature, if that dim is not known."""


class Shard(NamedTuple):
    """The mark of a shard."""

    dim: int | None = None
    """The dim of the features or heads; None if it is not known."""
    strides: tuple[int, ...] | None = None
    """The strides that the tensor would have with twice as many features or heads. Given only if
    the shard's strides do not show them, because a dim of size 1 may have any stride."""


UNKNOWN = Shard()
DRAWN = "drawn"


def mark_of(tensor: Any) -> Any:
    """Return a tensor's mark: a `Shard`, `DRAWN`, or None."""
    return getattr(tensor, MARK, None)


def set_mark(tensor: Tensor, mark: Any) -> Tensor:
    """Give a tensor a mark."""
    setattr(tensor, MARK, mark)
    return tensor


def mark_sharded(tensor: Tensor, dim: int | None = None) -> Tensor:
    """Mark a tensor as sharded. `dim`: the dim of the features or heads, if it is known."""
    return set_mark(tensor, Shard(dim))


def is_sharded(tensor: Any) -> bool:
    return isinstance(mark_of(tensor), Shard)


def sharded_dim(tensor: Any) -> int | None:
    """Return the sharded dim; None if it is not known, or no dim is sharded."""
    mark = mark_of(tensor)
    return mark.dim if isinstance(mark, Shard) else None


def marked(out: Any, shards: Sequence[Shard] = ()) -> Any:
    """Mark the tensors that a function has returned. `shards`: the mark of each, if known."""
    tensors = (
        [out]
        if isinstance(out, Tensor)
        else [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    )
    for place, tensor in enumerate(tensors):
        setattr(tensor, MARK, shards[place] if len(shards) == len(tensors) else UNKNOWN)
    return out


def full_like(shard: Tensor, ranks: int) -> tuple[list[int], list[int]]:
    """Return the shape of the full tensor, and its dims in one process's memory order. The sharded
    dim must be known."""
    mark = mark_of(shard)
    shape = list(shard.shape)
    shape[mark.dim] *= 2
    order = order_in_memory(tuple(shape), mark.strides or strides_of_twice(shard, mark.dim))
    shape[mark.dim] = shard.shape[mark.dim] * ranks
    return shape, order


@lru_cache(1000)
def order_in_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Return the dims in the order in which torch lays out a tensor made by `empty_like`."""
    dense = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
    return sorted(range(len(shape)), key=lambda dim: dense[dim], reverse=True)


def strides_of_twice(shard: Tensor, dim: int) -> tuple[int, ...]:
    """Return the strides of a tensor that is laid out like a shard, with twice as many features or
    heads."""
    reach = shard.stride(dim) * shard.shape[dim]
    return tuple(
        each * 2 if each >= reach and place != dim else each
        for place, each in enumerate(shard.stride())
    )
