"""Finds the sharded dim (heads or features) in the result of a torch function of shards. The
function is called on the meta device with twice as many heads or features. The dim that becomes
twice as large is the sharded dim. If a function only moves elements, the function is called with
the elements' indices along the sharded dim. The indices ascend along the sharded dim of the
result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.base.errors import RecipeError
from lockstep.base.nested import tree_tensors
from lockstep.base.torch_private import FakeTensor
from lockstep.model.tensor.elementwise import mapped
from lockstep.model.tensor.marks import (
    DRAWN,
    ONE,
    UNKNOWN,
    Shard,
    is_sharded,
    mark_of,
    sharded_dim,
    strides_of_twice,
)
from lockstep.model.tensor.operators import Kind, tensors_of

FAILS = (
    *(RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError),
    AttributeError,
)


def shards_of(
    func: Any, args: Any, kwargs: Any, kinds: set[Kind], outs: Sequence[Tensor]
) -> list[Shard]:
    given = [each for each in tensors_of(args, kwargs) if is_sharded(each)]
    dims = [sharded_dim(each) for each in given]
    if not outs or None in dims or "unknown" in kinds:
        return [UNKNOWN] * len(outs)
    twice = twice_as_many(func, args, kwargs)
    if twice is not None and len(twice) != len(outs):
        twice = None
    if "moves" in kinds and kinds <= {"keeps", "moves"}:
        found = _dims_of_moved(func, args, kwargs, given, len(outs))
    else:
        found = [None] * len(outs)
        if twice is not None:
            found = [_larger_dim(*each) for each in zip(outs, twice, strict=True)]
        others = _dims_of_computed(args, kwargs, given, [each.shape for each in outs])
        found = [other if dim is None else dim for dim, other in zip(found, others, strict=True)]
    shards = []
    for place, (out, dim) in enumerate(zip(outs, found, strict=True)):
        strides = None
        if twice is not None and dim is not None and dim != ONE and out.shape[dim] == 1:
            is_twice = _larger_dim(out, twice[place]) == dim
            strides = twice[place].stride() if is_twice else None
        shards.append(Shard(dim, strides))
    return shards


def twice_as_many(func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """Return None if `func` raises. Attention is computed on the device of its arguments, because
    its result's memory layout depends on the device."""

    def twice(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        shape, strides = list(item.shape), item.stride()
        mark = mark_of(item)
        if isinstance(mark, Shard) and mark.dim not in (None, ONE):
            assert mark.dim is not None, "checked above"
            strides = mark.strides or strides_of_twice(item, mark.dim)
            shape[mark.dim] *= 2
        is_fake = func is not F.scaled_dot_product_attention or isinstance(item, FakeTensor)
        device = "meta" if is_fake else item.device
        return torch.empty_strided(shape, strides, dtype=item.dtype, device=device)

    return _tensors(func, mapped(twice, args), mapped(twice, kwargs))


def check_drawn(func: Any, args: Any, kwargs: Any, shards: Sequence[Shard]) -> None:
    """Raise `RecipeError` if an argument holds random numbers that may have been drawn in a shard's
    shape."""
    drawn = [each for each in tensors_of(args, kwargs) if mark_of(each) is DRAWN]
    if not drawn:
        return
    is_followed = all(each.dim not in (None, ONE) for each in shards)
    if twice_as_many(func, args, kwargs) is None or not is_followed:
        raise RecipeError(
            f"{getattr(func, '__name__', func)} of random numbers of shape {tuple(drawn[0].shape)}"
            " and of a tensor that is sharded over the tensor axis; if they are drawn in the shape"
            " of a shard, each rank draws the same ones for its shard; use"
            " torch.nn.functional.dropout, draw them with size 1 for the heads or features, or give"
            " the layers before and after it 'colwise_gathered' and 'rowwise_split'"
        )


def _larger_dim(out: Tensor, twice: Tensor) -> int | None:
    if out.dim() != twice.dim():
        return None
    pairs = enumerate(zip(out.shape, twice.shape, strict=True))
    differ = [(dim, own, other) for dim, (own, other) in pairs if own != other]
    return differ[0][0] if len(differ) == 1 and differ[0][1] * 2 == differ[0][2] else None


def _tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    try:
        with torch.no_grad():
            out = func(*args, **kwargs)
    except FAILS:
        return None
    return tree_tensors(out)


def _dims_of_moved(
    func: Any, args: Any, kwargs: Any, given: list[Tensor], count: int
) -> list[int | None]:
    dims = [sharded_dim(each) for each in given]
    found = None
    if ONE not in dims:
        # try twice as many heads first, because one head shows no order; code that names the size
        # fails with these
        found = _labelled(func, args, kwargs, count, times=2)
        found = found or _labelled(func, args, kwargs, count, times=1)
    is_one = all(
        dim == ONE or (dim is not None and each.shape[dim] == 1)
        for each, dim in zip(given, dims, strict=True)
    )
    other = ONE if is_one else None
    return [other if dim is None else dim for dim in found or [None] * count]


def _dims_of_computed(
    args: Any, kwargs: Any, given: list[Tensor], shapes: list[torch.Size]
) -> list[int | None]:
    tensors = tensors_of(args, kwargs)
    count = max(each.dim() for each in tensors)
    try:
        full = torch.broadcast_shapes(*(each.shape for each in tensors))  # type: ignore[no-untyped-call]
    except RuntimeError:
        if any(each.dim() != count for each in given):
            return [None] * len(shapes)
        try:
            batch: Any = torch.broadcast_shapes(*(each.shape[:-2] for each in given))  # type: ignore[no-untyped-call]
        except RuntimeError:
            return [None] * len(shapes)
        full = (*batch, None, None)
    dims = {
        dim + len(full) - each.dim() if dim != ONE else ONE
        for each in given
        for dim in [sharded_dim(each)]
        if dim is not None
    }
    dim = dims.pop() if len(dims) == 1 or len(dims := dims - {ONE}) == 1 else None
    if dim is None or dim == ONE:
        return [dim] * len(shapes)
    # a sum by rows drops the last dims, or makes their size 1
    return [
        dim if shape[: dim + 1] == full[: dim + 1] and len(shape) <= len(full) else None
        for shape in shapes
    ]


def _labelled(
    func: Any, args: Any, kwargs: Any, count: int, *, times: int
) -> list[int | None] | None:
    def labels(item: Any, *, copy: bool) -> Any:
        if not is_sharded(item):
            # the function may write the tensor
            return item.clone() if isinstance(item, Tensor) else item
        dim = sharded_dim(item)
        assert dim is not None, "checked above"
        device = "cpu" if isinstance(item, FakeTensor) else item.device
        numbers = torch.arange(1, item.shape[dim] * times + 1, dtype=torch.float64, device=device)
        if item.is_complex():
            numbers = torch.complex(numbers, numbers)
        sizes = [*item.shape[:dim], len(numbers), *item.shape[dim + 1 :]]
        expanded = numbers.view(-1, *[1] * (item.dim() - dim - 1)).expand(sizes)
        return expanded.clone() if copy else expanded

    def called(label: Callable[[Any], Any]) -> list[Tensor] | None:
        return _tensors(func, mapped(label, args), mapped(label, kwargs))

    # most functions take labels that need no memory
    outs = called(lambda item: labels(item, copy=False))
    if outs is None:
        outs = called(lambda item: labels(item, copy=True))
    if outs is None or len(outs) != count:
        return None
    most = max(each.dim() for each in tensors_of(args, kwargs))
    # with one head, a new dim of size 1 may be mistaken for the dim of heads
    unclear = times == 1 and any(1 in each.shape and each.dim() > most for each in outs)
    return None if unclear else [_ascending_dim(each) for each in outs]


def _ascending_dim(labels: Tensor) -> int | None:
    labels = labels.real if labels.is_complex() else labels
    if not labels.numel():
        return None
    for dim, stride in enumerate(labels.stride()):
        if not stride:
            labels = labels.narrow(dim, 0, 1)
    found = []
    for dim, size in enumerate(labels.shape):
        if size > 1:
            rows = labels.movedim(dim, 0).reshape(size, -1)
            # zeros are padding, not labels
            least, most = rows.where(rows != 0, math.inf).amin(1), rows.amax(1)
            ascends = bool((least[1:] >= most[:-1]).all()) and bool(most[-1] > least[0])
            if ascends and bool(least.isfinite().all()):
                found.append(dim)
    return found[0] if len(found) == 1 else None
