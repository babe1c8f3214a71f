"""Marks on plain tensors, in a model with layers that are sharded over the `tensor` axis. A mark is
an attribute of the tensor. One mark says that the tensor is this rank's shard of the features or
heads. Another mark says that the tensor holds random numbers, which may have been drawn in the
shape of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.base.nested import tree_tensors

MARK = "_lockstep_mark"
ONE = -1
"""The value of `Shard.dim` for a shard with a single head or feature, whose dim is unknown."""


class Shard(NamedTuple):
    """The mark of a tensor that is this rank's shard of the features or heads."""

    dim: int | None = None
    """The dim of the features or heads, or None if the dim is not known."""
    strides: tuple[int, ...] | None = None
    """The strides of a tensor with twice as many features or heads. None if the strides follow from
    the shard's strides."""


UNKNOWN = Shard()
DRAWN = "drawn"


def mark_of(tensor: Any) -> Any:
    return getattr(tensor, MARK, None)


def set_mark(tensor: Tensor, mark: Any) -> Tensor:
    setattr(tensor, MARK, mark)
    return tensor


def mark_sharded(tensor: Tensor, dim: int | None = None) -> Tensor:
    return set_mark(tensor, Shard(dim))


def is_sharded(tensor: Any) -> bool:
    return isinstance(mark_of(tensor), Shard)


def sharded_dim(tensor: Any) -> int | None:
    mark = mark_of(tensor)
    return mark.dim if isinstance(mark, Shard) else None


def marked(out: Any, shards: Sequence[Shard] = ()) -> Any:
    tensors = [out] if isinstance(out, Tensor) else tree_tensors(out)
    for place, tensor in enumerate(tensors):
        setattr(tensor, MARK, shards[place] if len(shards) == len(tensors) else UNKNOWN)
    return out


def full_like(shard: Tensor, ranks: int) -> tuple[list[int], list[int]]:
    """Return the full tensor's shape, and its dims in memory order, outermost first."""
    mark = mark_of(shard)
    shape = list(shard.shape)
    shape[mark.dim] *= 2
    order = order_in_memory(tuple(shape), mark.strides or strides_of_twice(shard, mark.dim))
    shape[mark.dim] = shard.shape[mark.dim] * ranks
    return shape, order


@lru_cache(1000)
def order_in_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Return the dims from outermost to innermost, in the memory order that `empty_like` keeps."""
    dense = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
    return sorted(range(len(shape)), key=lambda dim: dense[dim], reverse=True)


def strides_of_twice(shard: Tensor, dim: int) -> tuple[int, ...]:
    reach = shard.stride(dim) * shard.shape[dim]
    return tuple(
        each * 2 if each >= reach and place != dim else each
        for place, each in enumerate(shard.stride())
    )
