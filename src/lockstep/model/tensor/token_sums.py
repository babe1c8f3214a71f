"""Sums over the tokens of a sharded tensor. With slices they are refused: a CPU adds them in an
order that depends on the number of features, and a shard has fewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.model.tensor.elementwise import tensors_of

SUMS = "sum nansum mean nanmean var std softmax log_softmax logsumexp"
OVER_DIMS: dict[Callable[..., Any], tuple[int, int | None]] = {
    **{
        getattr(owner, name): (1, None)
        for owner, names in {
            F: "softmax log_softmax softmin",
            torch: f"{SUMS} var_mean std_mean",
            Tensor: SUMS,
        }.items()
        for name in names.split()
    },
    **dict.fromkeys((torch.norm, Tensor.norm, torch.linalg.vector_norm), (2, None)),
    F.glu: (1, -1),
    F.normalize: (2, 1),
    F.cosine_similarity: (2, 1),
}
"""Functions that add, or round by place, along a dim: the place of this argument, and its
default."""
OVER_TOKENS = frozenset(
    [
        *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.lp_pool1d, F.lp_pool2d),
        *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
        *(F.batch_norm, F.instance_norm, F.group_norm),
    ]
)


def sums_tokens(func: Any, args: Any, kwargs: Any) -> bool:
    """True if the function adds elements of other tokens or samples. Sums over the last dim, of
    each head's features or scores, are added row by row."""
    if func in OVER_TOKENS:
        return True
    if func not in OVER_DIMS:
        return False
    given = args[0] if args else kwargs["input"]
    place, dims = OVER_DIMS[func]
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else dims))
    each = list(dims) if isinstance(dims, list | tuple) else [dims]
    if not given.is_floating_point() or not given.dim():
        return False
    return isinstance(dims, bool) or any(dim not in (-1, given.dim() - 1) for dim in each or [None])


def gradient_sums_tokens(
    out: Any, args: Any, kwargs: Any, is_sharded: Callable[[Any], bool]
) -> bool:
    """True if a sharded tensor has been broadcast over tokens or samples: its gradient is a sum
    over them. `out`: the result."""
    tensors = list(tensors_of(args, kwargs))
    if not isinstance(out, Tensor) or not out.requires_grad or len(tensors) < 2:
        return False
    try:
        if torch.broadcast_shapes(*(each.shape for each in tensors)) != out.shape:  # type: ignore[no-untyped-call]
            return False
    except RuntimeError:
        return False
    return any(
        each.requires_grad and is_sharded(each) and _rows(each, out.dim()) != out.shape[:-1]
        for each in tensors
        if each.dim()
    )


def _rows(tensor: Tensor, dims: int) -> torch.Size:
    """Return the shape without the last dim, as that of a tensor of `dims` dims."""
    return torch.Size([1] * (dims - tensor.dim())) + tensor.shape[:-1]
