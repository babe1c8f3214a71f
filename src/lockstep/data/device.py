from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.base.nested import map_parts


def to_device(batch: Any, device: torch.device) -> Any:
    """Copies tensors in dicts, lists, tuples and dataclasses. Objects with a method `to` are copied
    by `to`. A separate stream copies while the previous microbatch is computed. Computation that is
    queued later waits for the copy."""
    if device.type == "cpu":
        return batch
    if not accelerator.has_streams(device):
        return map_parts(batch, lambda tensor: tensor.to(device), lambda thing: thing.to(device))
    compute, copies = accelerator.current_stream(device), _copy_stream(device)

    def move(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        if accelerator.is_accelerator(tensor):
            return tensor.to(device)
        with copies:
            moved = tensor.to(device, non_blocking=True)
        # The copy stream owns the memory; this prevents its reuse before the computation has ended.
        moved.record_stream(compute)
        return moved

    moved = map_parts(batch, move, lambda thing: thing.to(device))
    compute.wait_stream(copies)
    return moved


def pin(batch: Any) -> Any:
    return map_parts(
        batch,
        lambda tensor: tensor.pin_memory() if tensor.is_cpu else tensor,
        lambda thing: thing.pin_memory() if hasattr(thing, "pin_memory") else thing,
    )


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
