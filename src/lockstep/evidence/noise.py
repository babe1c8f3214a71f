"""Adds noise of one unit in the last place to a model, to measure the effect of rounding."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn


def add_noise(model: nn.Module, seed: int) -> None:
    """Add noise of one unit in the last place to every parameter, every layer's output, and the
    gradient of every output."""
    # In a short dtype, the outputs of layers are rounded; noise only in parameters, which are in
    # float32, would be too small.
    perturb_parameters(model, seed)
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(_OutputNoise(name, seed))


@torch.no_grad()
def perturb_parameters(model: nn.Module, seed: int) -> None:
    """Change every parameter by one unit in the last place, up or down."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.copy_(_neighbours(parameter, up=_random(name, seed, parameter) > 0))


class _OutputNoise:
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
        return _with_noise(x, name, seed)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name, seed = ctx.key
        return _with_noise(gradients[0], f"{name}/backward", seed), None, None


def _with_noise(x: Tensor, name: str, seed: int) -> Tensor:
    return x + x * (torch.finfo(x.dtype).eps * _random(name, seed, x))


def _random(name: str, seed: int, like: Tensor) -> Tensor:
    """Return uniform numbers in -1..1 that depend only on `name` and `seed`."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return (torch.rand(like.shape, generator=generator, dtype=torch.float32) * 2 - 1).to(
        like.device, like.dtype
    )


def _neighbours(value: Tensor, up: Tensor) -> Tensor:
    """Return the next larger or smaller number for each element. A dtype without nextafter gets the
    number one epsilon away."""
    if value.dtype in (torch.float32, torch.float64):
        infinity = torch.full_like(value, torch.inf)
        return torch.nextafter(value, torch.where(up, infinity, -infinity))
    step = torch.where(up, torch.finfo(value.dtype).eps, -torch.finfo(value.dtype).eps)
    return (value.double() * (1 + step)).to(value.dtype)
