"""The mark of a plain tensor that contains a shard of the features, or of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep.base.torch_private import tree_leaves

MARK = "_lockstep_sharded"
ONE = -1
"""The dim of a shard of one head or feature that is in a dim that is not known."""


def mark_sharded(tensor: Tensor, dim: int | None = None) -> Tensor:
    """Mark a tensor as sharded. `dim`: the dim of the features or heads, if it is known."""
    setattr(tensor, MARK, dim)
    return tensor


def is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, MARK)


def sharded_dim(tensor: Any) -> int | None:
    """Return the dim that is sharded; None if it is not known, or none is."""
    dim: int | None = getattr(tensor, MARK, None)
    return dim


def marked(out: Any, dims: Sequence[int | None] = ()) -> Any:
    """Mark the tensors that a function has returned. `dims`: the dim of each, if known."""
    tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    for place, tensor in enumerate(tensors):
        mark_sharded(tensor, dims[place] if len(dims) == len(tensors) else None)
    return out
