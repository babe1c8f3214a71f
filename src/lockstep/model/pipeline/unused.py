"""Zeros that stand for missing gradients of parameters that a microbatch does not use. Under
zero-bubble, torch asks for the gradient of each parameter in the graph, and raises if a gradient is
missing."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

_UNUSED = "lockstep_is_unused"


def given_or_unused(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    if gradient is not None:
        return gradient
    zeros = parameter.new_zeros(()).expand_as(parameter)
    setattr(zeros, _UNUSED, True)
    return zeros


def clear_unused(parameters: Iterable[Tensor]) -> None:
    for each in parameters:
        if hasattr(each.grad, _UNUSED):
            each.grad = None
