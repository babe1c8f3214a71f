"""Changes to a run that make it comparable: noise of the size of rounding, float64, eval mode.

Where `lockstep verify` asks for it, `Session.prepare` calls `change_model` right after the user's function has built the model,
`Session.steps` calls `change_defaults`, and `Step.microbatches` gives its batches to `change_batch`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.torch_private import TorchDispatchMode
from lockstep.verify.trace_request import Tracing


def change_model(model: nn.Module, tracing: Tracing) -> None:
    """Make the model a twin's, in place. In float64 the parameters keep their values: they are drawn in their own type."""
    if tracing.float64:
        model.to(torch.float64)
    if tracing.eval_mode:
        model.eval()
        model.train = lambda mode=True: model  # type: ignore[method-assign]  # whoever asks for it: it stays as it is
    if tracing.noise is not None:
        add_noise(model, tracing.noise)


def change_defaults(tracing: Tracing) -> None:
    """In float64: what forwards make has that type too. Called once all models are built, whose values are drawn in the usual type."""
    if tracing.float64:
        torch.set_default_dtype(torch.float64)


def change_batch(batch: Any, tracing: Tracing) -> Any:
    """Return the batch to compute with: floating-point tensors in float64 if the run is in float64."""
    return to_float64(batch) if tracing.float64 else batch


def to_float64(batch: Any) -> Any:
    """Every floating-point tensor in a nest of lists, tuples and mappings in float64; anything else as it is."""
    if isinstance(batch, Tensor):
        return batch.to(torch.float64) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return type(batch)({name: to_float64(part) for name, part in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(to_float64, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(to_float64, batch))
    return batch


def add_noise(model: nn.Module, seed: int) -> None:
    """Move every parameter by one unit in the last place, up or down, and the output of every layer by up to one of its own type.

    The second in the forward and, for the gradient that comes back, in the backward: that is where a plan cuts a model, and where a
    product in a short type is rounded (parameters are in float32 then, and moving them is too quiet). No default generator is drawn from.
    """
    move_parameters(model, seed)
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(_Noisy(name, seed))


@torch.no_grad()
def move_parameters(model: nn.Module, seed: int) -> None:
    """Move every parameter by one unit in the last place, up or down."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            up = _random(name, seed, parameter) > 0
            parameter.copy_(_next(parameter, up))


class Islands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of a float64 run that make a shorter type of float64: behind them it sees no better than that type does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self.eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(isinstance(given, Tensor) and given.dtype is torch.float64 for given in args):
            return out
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64:
                self.found.add(str(func.overloadpacket))
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        return out


class _Noisy:
    """A forward hook that rounds a module's output, as it were, once more."""

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._seed = seed
        self._calls = 0

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        self._calls += 1
        return _Noise.apply(output, f"{self._name}/{self._calls}", self._seed)  # type: ignore[no-untyped-call]


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, seed: int) -> Tensor:
        ctx.key = (name, seed)
        return _rounded_otherwise(x, name, seed)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name, seed = ctx.key
        return _rounded_otherwise(gradients[0], f"{name}/backward", seed), None, None


def _rounded_otherwise(x: Tensor, name: str, seed: int) -> Tensor:
    return x + x * (torch.finfo(x.dtype).eps * _random(name, seed, x))


def _random(name: str, seed: int, like: Tensor) -> Tensor:
    """Uniform in -1..1, of the shape and type of `like`: the same in every run."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return (torch.rand(like.shape, generator=generator, dtype=torch.float32) * 2 - 1).to(like.device, like.dtype)


def _next(value: Tensor, up: Tensor) -> Tensor:
    """The neighbouring number of each element; of a type without nextafter, one step of its relative precision away."""
    if value.dtype in (torch.float32, torch.float64):
        infinity = torch.full_like(value, torch.inf)
        return torch.nextafter(value, torch.where(up, infinity, -infinity))
    step = torch.where(up, torch.finfo(value.dtype).eps, -torch.finfo(value.dtype).eps)
    return (value.double() * (1 + step)).to(value.dtype)
