"""Fake parameters and buffers (torch's tensors without values): they keep their class and get
contents in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.torch_private import FAKE_PARAMETER_MARK, make_subclass, swap_implementations


def replace_contents(tensor: Any, new: Any) -> Any:
    """Exchange two tensors' contents; `tensor` keeps identity, class and attributes. Returns its
    former contents."""
    kind = _plain_class(tensor)
    if issubclass(kind, nn.Parameter):
        new = make_subclass(kind, new, tensor.requires_grad)
    else:
        new.requires_grad_(tensor.requires_grad)
    kept = {name: value for name, value in vars(tensor).items() if name not in _fake_attributes()}
    former = vars(tensor).copy()
    swap_implementations(tensor, new)
    tensor.__class__, new.__class__ = new.__class__, tensor.__class__
    vars(tensor).clear()
    vars(tensor).update(kept)
    vars(new).update(former)
    return new


def _plain_class(tensor: Any) -> Any:
    """Return the class that a tensor would have if it were not fake."""
    from lockstep.base.torch_private import FakeTensor

    if not isinstance(tensor, FakeTensor):
        return type(tensor)
    if type(tensor) is not FakeTensor:
        return type(tensor).__mro__[2]
    return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor


@cache
def _fake_attributes() -> frozenset[str]:
    from lockstep.base.torch_private import FakeTensorMode

    with FakeTensorMode():
        return frozenset(vars(torch.empty(1))) | {FAKE_PARAMETER_MARK}


@contextmanager
def fake_parameters_keep_class(fake_class: Any, is_fake: Callable[[Any], bool]) -> Iterator[None]:
    """Let fake parameters keep their subclass, and let `module.to` keep parameters with their
    attributes."""
    make: Any = nn.Parameter.__new__
    swap: Any = torch.utils.swap_tensors

    def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        parameter: Any = make(cls, data, requires_grad)
        if cls is not nn.Parameter and is_fake(parameter):
            parameter.__class__ = type(cls.__name__, (fake_class, cls), {})
        return parameter

    def swapped(one: Any, other: Any) -> None:
        if is_fake(one) and is_fake(other):
            former = one.detach()
            one.data = other
            other.data = former
        else:
            swap(one, other)

    nn.Parameter.__new__ = made  # type: ignore[method-assign]
    torch.utils.swap_tensors = swapped
    try:
        yield
    finally:
        nn.Parameter.__new__ = make  # type: ignore[method-assign]
        torch.utils.swap_tensors = swap
