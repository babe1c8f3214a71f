"""Functions of each element by itself, with the same bits at any place of a tensor.

A CPU's kernel computes most elements in vectors, and the last ones by another function, which
rounds differently. A shard ends elsewhere than the full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

VECTOR_ELEMENTS = 64
"""The most elements that a CPU's kernel computes at once, in bf16 with AVX-512."""
NAMES = (
    "exp exp2 expm1 log log2 log10 log1p sigmoid tanh erf erfc erfinv sin cos tan asin acos atan"
    " sinh cosh asinh acosh atanh lgamma digamma sinc logit pow float_power rsqrt reciprocal xlogy"
    " atan2 hypot logaddexp logaddexp2 lerp addcmul addcdiv"
)
ROUNDED_BY_PLACE = frozenset(
    getattr(owner, each)
    for owner, names in {
        F: "gelu silu mish softplus elu celu selu logsigmoid tanhshrink hardswish hardsigmoid",
        torch: f"{NAMES} celu selu",
        Tensor: f"{NAMES} __pow__ __rpow__",
        torch.special: "expit exp2 expm1 log1p erf erfc erfcx erfinv gammaln psi digamma sinc logit"
        " ndtr ndtri log_ndtr i0 i0e i1 i1e entr xlogy xlog1py zeta",
    }.items()
    for name in names.split()
    for each in (name, f"{name}_")
    if hasattr(owner, each)
)
"""The functions that a CPU computes by an approximation, or by several operations at once. So are
sums with `alpha`."""
SUMS = frozenset(getattr(owner, name) for owner in (torch, Tensor) for name in ("add", "sub")) | {
    Tensor.add_,
    Tensor.sub_,
}


def is_rounded_by_place(func: Any, kwargs: Any) -> bool:
    return func in ROUNDED_BY_PLACE or (func in SUMS and "alpha" in kwargs)


def elementwise(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Call a function of `ROUNDED_BY_PLACE` so that the bits of an element do not depend on its
    place."""
    in_place = func.__name__.endswith("_") and not func.__name__.endswith("__")
    in_place = in_place or kwargs.get("inplace", False) or any(each is True for each in args)
    tensors = list(tensors_of(args, kwargs))
    shape: torch.Size = torch.broadcast_shapes(*(each.shape for each in tensors))  # type: ignore[no-untyped-call]
    rest = -shape.numel() % VECTOR_ELEMENTS
    is_flat = all(
        not each.dim() or (each.shape == shape and each.is_contiguous()) for each in tensors
    )
    if is_flat and not rest:
        return func(*args, **kwargs)  # type: ignore[no-any-return]

    def padded(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        flat = item.expand(shape).reshape(-1)
        return F.pad(flat.clone() if in_place else flat, (0, rest), value=1.0)

    out = func(*mapped(padded, args), **mapped(padded, kwargs))
    result: Tensor = out[: shape.numel()].view(shape)
    return tensors[0].copy_(result) if in_place else result


def tensors_of(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a call, including those in lists and tuples."""
    for item in (*args, *kwargs.values()):
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from (member for member in item if isinstance(member, Tensor))


def mapped(change: Callable[[Any], Any], nest: Any) -> Any:
    """Return the arguments of a call with `change` applied to each, including those in lists,
    tuples and dicts."""
    if isinstance(nest, dict):
        return {name: mapped(change, item) for name, item in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)(mapped(change, item) for item in nest)
    return change(nest)
