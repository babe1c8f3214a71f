"""Lays out what an optimizer multiplies (Shampoo, SOAP, Muon) in the same way on any number of
ranks, and after a resume: a product of matrices rounds by where they begin in memory, and by their
strides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.optim import Optimizer

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
        for owner, state in optimizer.state.items():
            if isinstance(state, dict):
                _lay_out_state(state, getattr(owner, "shape", None))


def laid_out(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that begins where a vector may, with the same strides."""
    return tensor if is_aligned(to_local(tensor)) else tensor.clone()


def _lay_out_state(held: dict[Any, Any] | list[Any], shape: Size | None) -> None:
    """`shape`: of tensors that have a parameter's strides."""
    for name, each in held.items() if isinstance(held, dict) else enumerate(held):
        if isinstance(each, dict | list):
            _lay_out_state(each, None)
        elif isinstance(each, Tensor) and to_local(each) is each and each.layout is torch.strided:
            held[name] = laid_out(each) if each.shape == shape else aligned(each)
