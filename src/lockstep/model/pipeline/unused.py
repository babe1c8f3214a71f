"""Gradients of parameters that a microbatch does not use, in a backward of weights alone.

Under zero-bubble, torch asks for the gradient of each parameter in the graph, and raises if one has
none. One node stands for the chunks of a stage, so all parameters of the stage are in the graph."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def given_or_unused(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Return the gradient; if there is none: zeros that `clear_unused` knows."""
    if gradient is not None:
        return gradient
    return _zero(parameter.dtype, parameter.device).expand_as(parameter)


def clear_unused(parameters: Iterable[Tensor]) -> None:
    """Clear the gradients of parameters that have none but these zeros."""
    for each in parameters:
        gradient = each.grad
        if gradient is None:
            continue
        zero = _zero(gradient.dtype, gradient.device)
        if gradient.untyped_storage().data_ptr() == zero.untyped_storage().data_ptr():
            each.grad = None
