"""Copying batches from the host to the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.base import accelerator


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch on `device`: tensors in dicts, lists, tuples and dataclasses, and objects
    with a method `to`. On the CPU it returns the batch itself. On a device with streams, a separate
    stream copies during the previous microbatch, and later computation waits for the copy; the host
    does not wait if the memory is pinned."""
    if device.type == "cpu":
        return batch
    if not accelerator.has_streams(device):
        return _map(batch, lambda tensor: tensor.to(device), lambda thing: thing.to(device))
    compute, copies = accelerator.current_stream(device), _copy_stream(device)

    def move(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        if accelerator.is_accelerator(tensor):
            return tensor.to(device)
        with copies:
            moved = tensor.to(device, non_blocking=True)
        # The memory belongs to the stream of the copies: this prevents its reuse before the
        # computation has ended.
        moved.record_stream(compute)
        return moved

    moved = _map(batch, move, lambda thing: thing.to(device))
    compute.wait_stream(copies)
    return moved


def pin(batch: Any) -> Any:
    """Return the batch in pinned memory."""
    return _map(
        batch,
        lambda tensor: tensor.pin_memory() if tensor.is_cpu else tensor,
        lambda thing: thing.pin_memory() if hasattr(thing, "pin_memory") else thing,
    )


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the same containers with every tensor replaced by `function` of it."""
    return _map(value, function, lambda thing: thing)


def _map(value: Any, of_tensor: Callable[[Tensor], Tensor], of_thing: Callable[[Any], Any]) -> Any:
    """Return the same containers with tensors, and objects with a method `to`, replaced."""
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, type):
        return value
    if hasattr(value, "to"):
        return of_thing(value)
    if isinstance(value, Mapping):
        parts = {name: _map(part, of_tensor, of_thing) for name, part in value.items()}
        if type(value) is dict:
            return parts
        changed: Any = copy.copy(value)
        for name, part in parts.items():  # the outputs of transformers refuse `update`
            changed[name] = part
        return changed
    if isinstance(value, list | tuple):
        moved = [_map(part, of_tensor, of_thing) for part in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if is_dataclass(value):
        changed = copy.copy(value)
        for field in fields(value):
            object.__setattr__(
                changed, field.name, _map(getattr(value, field.name), of_tensor, of_thing)
            )
        return changed
    return value
