"""Contexts and tolerances for forwards that check a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from lockstep.base import accelerator
from lockstep.base.torch_private import BatchNormBase, to_local
from lockstep.model.shard import reshard

SINGLE = torch.finfo(torch.float32).eps
TF32 = 2.0**-10
ROUNDINGS, SHORT_ROUNDINGS = 16.0, 4.0
"""Largest allowed relative error between two results that are computed in different orders.
`ROUNDINGS` is in units of the dtype's epsilon to the power of 3/4 (1e-4 in float32).
`SHORT_ROUNDINGS`, for dtypes less precise than float32, is in units of the dtype's epsilon (3% in
bfloat16)."""
SMALL = 1e-2
"""Parameters whose elements are all smaller in magnitude count as zero."""

_is_inside = ContextVar("inside a trial", default=False)


def in_trial() -> bool:
    """Return True while a module's forward is repeated to check its output."""
    return _is_inside.get()


@contextmanager
def trial() -> Iterator[None]:
    before = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(before)


def tolerance(tensor: Tensor) -> float:
    """Return the largest relative difference that rounding explains between `tensor` and the same
    result computed in another order."""
    eps = epsilon(tensor)
    return ROUNDINGS * eps**0.75 if eps <= SINGLE else SHORT_ROUNDINGS * eps


def epsilon(tensor: Tensor) -> float:
    """Return the epsilon of the least precise dtype in which `tensor` may have been computed. The
    candidate dtypes are the tensor's dtype, autocast's dtype, and TF32."""
    kinds = [tensor.dtype]
    if torch.is_autocast_enabled(tensor.device.type):
        kinds.append(torch.get_autocast_dtype(tensor.device.type))
    eps = max(torch.finfo(kind).eps for kind in kinds)
    is_tf32 = not tensor.is_cpu and torch.get_float32_matmul_precision() != "highest"
    return max(eps, TF32) if is_tf32 and eps <= SINGLE else eps


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the default generators and the model's buffers at the end."""
    with (
        unchanged_buffers([model]),
        torch.no_grad(),
        accelerator.preserved_generators(device),
    ):
        yield


@contextmanager
def unchanged_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                # a write would increase the version, and look like a change by the forward
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


@contextmanager
def nothing_dropped(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, except for BatchNorm, which normalizes with the statistics of the
    batch."""
    modes = [(each, each.training) for each in model.modules()]
    try:
        for each, _ in modes:
            each.training = isinstance(each, BatchNormBase)
        yield
    finally:
        for each, training in modes:
            each.training = training


@contextmanager
def all_in_use(model: nn.Module) -> Iterator[None]:
    """Replace parameters whose values are zero or tiny by random values, the same on all ranks. A
    branch behind a zero gate then affects the output."""
    generator, before = torch.Generator(), []
    reshard(model)  # forwards may have left parameters gathered
    try:
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                # `data` does not change the version: the values are restored
                part = to_local(parameter).data
                if not (parameter.requires_grad and part.is_floating_point() and part.numel()):
                    continue
                if part.abs().max() < SMALL:
                    before.append((part, part.clone()))
                    generator.manual_seed(number)
                    part.copy_(0.1 * torch.randn(part.shape, generator=generator))
        _forget_copies(model)
        yield
    finally:
        with torch.no_grad():
            for part, values in before:
                part.copy_(values)
        _forget_copies(model)


def _forget_copies(model: nn.Module) -> None:
    reshard(model)
    torch.clear_autocast_cache()
