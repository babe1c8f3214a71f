"""Changes that make a run comparable, applied by the probe: noise of the size of rounding, float64,
eval mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.torch_private import TorchDispatchMode
from lockstep.evidence.noise import add_noise
from lockstep.verify.jobs import TraceRequest


def change_model(model: nn.Module, request: TraceRequest) -> None:
    """Change a model that has just been built, in place. In float64 it keeps the initial values of
    its own dtype."""
    if request.float64:
        model.to(torch.float64)
    if request.eval_mode:
        model.eval()
        model.train = lambda mode=True: model  # type: ignore[method-assign]  # the script cannot leave eval mode
    if request.noise_seed is not None:
        add_noise(model, request.noise_seed)


def to_float64(batch: Any) -> Any:
    """Convert the floating-point tensors in nested lists, tuples and mappings to float64."""
    if isinstance(batch, Tensor):
        return batch.to(torch.float64) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return type(batch)({name: to_float64(part) for name, part in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(to_float64, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(to_float64, batch))
    return batch


class ShortDtypeOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations of a float64 run that return a shorter dtype: after them the run is only
    as exact as that."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self.eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(isinstance(value, Tensor) and value.dtype is torch.float64 for value in args):
            return out
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if (
                isinstance(tensor, Tensor)
                and tensor.is_floating_point()
                and tensor.dtype is not torch.float64
            ):
                self.found.add(str(func.overloadpacket))
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        return out
