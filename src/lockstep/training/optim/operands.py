"""Lays out what an optimizer multiplies (Shampoo, SOAP, Muon) in the same way on any number of
ranks, and after a resume: a product of matrices rounds by where they begin in memory, and by their
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
    """True unless all optimizers are torch's that compute element by element."""
    return any(
        type(each).__name__ == "Muon" or not type(each).step.__module__.startswith("torch.optim.")
        for each in optimizers
    )


def lay_out(parameters: Iterable[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Copy gradients that begin within a vector, in a bucket, and state that begins there, or whose
    elements are in another order than a saved one's (the eigenvectors of `eigh`)."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = laid_out(parameter.grad)
    for optimizer in optimizers:
        storages = Counter(map(_storage, _tensors(list(optimizer.state.values()))))
        for owner, state in optimizer.state.items():
            if isinstance(state, dict):
                _lay_out_state(state, getattr(owner, "shape", None), storages)


def laid_out(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that begins where a vector may, with the same strides."""
    return tensor if is_aligned(to_local(tensor)) else tensor.clone()


def _lay_out_state(
    held: dict[Any, Any] | list[Any], shape: Size | None, storages: Counter[int]
) -> None:
    """Replace each tensor that lies in another way; not one of two tensors in one storage, because
    a copy would no longer change with the other one. `shape`: of tensors that have a parameter's
    strides."""
    for name, each in held.items() if isinstance(held, dict) else enumerate(held):
        if isinstance(each, dict | list):
            _lay_out_state(each, None, storages)
        elif _is_dense(each) and storages[_storage(each)] == 1:
            held[name] = laid_out(each) if each.shape == shape else aligned(each)


def _tensors(held: Any) -> Iterator[Tensor]:
    """Yield the dense tensors in a state."""
    if isinstance(held, dict | list):
        for each in held.values() if isinstance(held, dict) else held:
            yield from _tensors(each)
    elif _is_dense(held):
        yield held


def _is_dense(held: Any) -> TypeGuard[Tensor]:
    return isinstance(held, Tensor) and to_local(held) is held and held.layout is torch.strided


def _storage(tensor: Tensor) -> int:
    return storage_address(tensor.untyped_storage())
