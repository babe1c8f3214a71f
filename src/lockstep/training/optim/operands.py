"""Gives the matrices that an optimizer multiplies (Shampoo, SOAP, Muon) the same memory alignment
and strides on any number of ranks. The rounding of a matrix product depends on alignment and
strides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Size, Tensor, nn
from torch.optim import Optimizer

from lockstep.base.torch_private import storage_address
from lockstep.comm.mesh import to_local
from lockstep.model.tensor.elementwise import aligned, is_aligned


def may_multiply(optimizers: Iterable[Optimizer]) -> bool:
    return any(
        type(each).__name__ == "Muon" or not type(each).step.__module__.startswith("torch.optim.")
        for each in optimizers
    )


def align_operands(parameters: Iterable[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Copy gradients and optimizer state that are unaligned, or whose strides would differ after a
    resume."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = with_alignment(parameter.grad)
    for optimizer in optimizers:
        storages = Counter(map(_storage, _tensors(list(optimizer.state.values()))))
        for owner, state in optimizer.state.items():
            if isinstance(state, dict):
                _align_state(state, getattr(owner, "shape", None), storages)


def with_alignment(tensor: Tensor) -> Tensor:
    """Copy the tensor with the same strides, unless it is aligned for vector instructions."""
    return tensor if is_aligned(to_local(tensor)) else tensor.clone()


def _align_state(
    held: dict[Any, Any] | list[Any], shape: Size | None, storages: Counter[int]
) -> None:
    """Does not copy a tensor that shares its storage with another tensor. Tensors of the
    parameter's shape keep their strides. All tensors of another shape become contiguous."""
    for name, each in held.items() if isinstance(held, dict) else enumerate(held):
        if isinstance(each, dict | list):
            _align_state(each, None, storages)
        elif _is_dense(each) and storages[_storage(each)] == 1:
            held[name] = with_alignment(each) if each.shape == shape else aligned(each)


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, dict | list):
        for each in held.values() if isinstance(held, dict) else held:
            yield from _tensors(each)
    elif _is_dense(held):
        yield held


def _is_dense(held: Any) -> TypeGuard[Tensor]:
    return isinstance(held, Tensor) and to_local(held) is held and held.layout is torch.strided


def _storage(tensor: Tensor) -> int:
    return storage_address(tensor.untyped_storage())
