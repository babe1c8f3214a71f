"""Calls of elementwise functions whose result has bits that do not depend on an element's position
in the tensor. A CPU's kernel computes most elements in SIMD vectors. A scalar function computes the
last few elements of a tensor, and rounds differently from the SIMD kernel. The last elements of a
shard are not the last elements of the full tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.model.tensor.operators import tensors_of

VECTOR_ELEMENTS = 64
"""Largest number of elements that a CPU's kernel computes in one pass of its loop, in bf16 with
AVX-512."""
ALIGNMENT = 64


def elementwise(func: Any, args: Any, kwargs: Any, *, in_place: bool = False) -> Tensor:
    tensors = tensors_of(args, kwargs)
    shape: torch.Size = torch.broadcast_shapes(*(each.shape for each in tensors))  # type: ignore[no-untyped-call]
    rest = -shape.numel() % VECTOR_ELEMENTS
    is_flat = all(
        not each.dim() or (each.shape == shape and aligned(each) is each) for each in tensors
    )
    if is_flat and not rest:
        return aligned_gradient(func(*args, **kwargs))  # type: ignore[no-any-return]

    def padded(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        flat = item.expand(shape).reshape(-1)
        return F.pad(flat.clone() if in_place else flat, (0, rest), value=1.0)

    out = func(*mapped(padded, args), **mapped(padded, kwargs))
    result: Tensor = out[: shape.numel()].view(shape)
    return tensors[0].copy_(result) if in_place else aligned_gradient(result)


def aligned(tensor: Tensor) -> Tensor:
    """Return contiguous elements at an aligned address. BLAS and other libraries round strided or
    unaligned tensors differently."""
    tensor = tensor.contiguous()
    return tensor if is_aligned(tensor) else tensor.clone()


def is_aligned(tensor: Tensor) -> bool:
    return tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0


def aligned_gradient(item: Any) -> Any:
    """Make the gradient of a tensor contiguous and aligned, before the backward of the function
    that returned the tensor."""
    if isinstance(item, Tensor) and item.requires_grad:
        item.register_hook(aligned)  # type: ignore[no-untyped-call]
    return item


def mapped(change: Callable[[Any], Any], nest: Any) -> Any:
    if isinstance(nest, dict):
        return {name: mapped(change, item) for name, item in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)(mapped(change, item) for item in nest)
    return change(nest)
