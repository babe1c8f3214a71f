"""Finds the dim of the heads, or of the features, in what a function of sharded tensors returns.

A function that moves elements is called with labels in their place: each element's index along the
sharded dim. The labels of the result ascend along one dim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.base.torch_private import FakeTensor, tree_leaves
from lockstep.model.tensor.elementwise import mapped
from lockstep.model.tensor.marks import ONE, is_sharded, sharded_dim
from lockstep.model.tensor.operators import tensors_of


def dims_of_moved(func: Any, args: Any, kwargs: Any, count: int) -> list[int | None]:
    """Return the sharded dim of each of the `count` tensors that a function returns, which only
    moves elements."""
    # code that does not name the size gets twice as many heads: one head has no order
    given = [each for each in tensors_of(args, kwargs) if is_sharded(each)]
    dims = [sharded_dim(each) for each in given]
    found = None
    if None not in dims and ONE not in dims:
        found = _labelled(func, args, kwargs, count, times=2)
        found = found or _labelled(func, args, kwargs, count, times=1)
    is_one = all(
        dim == ONE or (dim is not None and each.shape[dim] == 1)
        for each, dim in zip(given, dims, strict=True)
    )
    other = ONE if is_one else None
    return [other if dim is None else dim for dim in found or [None] * count]


def dims_of_computed(args: Any, kwargs: Any, shapes: list[torch.Size]) -> list[int | None]:
    """Return the sharded dim of each result of a function of each element, or of each row."""
    tensors = tensors_of(args, kwargs)
    try:
        full: torch.Size = torch.broadcast_shapes(*(each.shape for each in tensors))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return [None] * len(shapes)
    dims = {
        dim + len(full) - each.dim() if dim not in (None, ONE) else dim
        for each in tensors
        if is_sharded(each)
        for dim in [sharded_dim(each)]
    }
    dim = dims.pop() if len(dims) == 1 or len(dims := dims - {ONE}) == 1 else None
    if dim is None or dim == ONE:
        return [dim] * len(shapes)
    # a sum over rows drops its last dims, or makes them 1
    return [
        dim if shape[: dim + 1] == full[: dim + 1] and len(shape) <= len(full) else None
        for shape in shapes
    ]


def _labelled(
    func: Any, args: Any, kwargs: Any, count: int, *, times: int
) -> list[int | None] | None:
    def labels(item: Any) -> Any:
        if not is_sharded(item):
            return item
        dim = sharded_dim(item)
        assert dim is not None, "checked above"
        device = "cpu" if isinstance(item, FakeTensor) else item.device
        numbers = torch.arange(item.shape[dim] * times, dtype=torch.float64, device=device)
        if item.is_complex():
            numbers = torch.complex(numbers, numbers)
        sizes = [*item.shape[:dim], len(numbers), *item.shape[dim + 1 :]]
        return numbers.view(-1, *[1] * (item.dim() - dim - 1)).expand(sizes).clone()

    try:
        with torch.no_grad():
            out = func(*mapped(labels, args), **mapped(labels, kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    if len(outs) != count:
        return None
    most = max(each.dim() for each in tensors_of(args, kwargs))
    # with the sizes as they are, a new dim of size 1 may be that of one head
    unclear = times == 1 and any(1 in each.shape and each.dim() > most for each in outs)
    return None if unclear else [_ascending_dim(each) for each in outs]


def _ascending_dim(labels: Tensor) -> int | None:
    labels = labels.real if labels.is_complex() else labels
    found = []
    for dim, size in enumerate(labels.shape):
        if size > 1 and labels.numel():
            rows = labels.movedim(dim, 0).reshape(size, -1)
            least, most = rows.amin(1), rows.amax(1)
            if bool((least[1:] >= most[:-1]).all()) and bool(most[-1] > least[0]):
                found.append(dim)
    return found[0] if len(found) == 1 else None
