"""A network whose products one process computes wrong: one bit of the mantissa of one element."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.model.tensor import sliced

PRODUCTS = ("forward", "input gradient", "weight gradient")


@dataclass(slots=True)
class Fault:
    """A fault of this process: in each product of one kind, from one step on."""

    product: str
    begin: int
    least: int = 0
    """Products with fewer elements are right."""
    seed: int = 0
    same: bool = False
    """True: always the same bit of the same element, as a stuck gate."""
    step: int = 0
    fired: int = 0


FAULT: list[Fault] = []
"""The fault of this process, if it has one."""


def computed(product: str, value: Tensor) -> Tensor:
    for fault in FAULT:
        if fault.product == product and fault.step >= fault.begin and value.numel() >= fault.least:
            fault.fired += 1
            generator = random.Random(f"{fault.seed} {0 if fault.same else fault.fired}")
            bits = value.view(-1).view(torch.int32)
            bits[generator.randrange(len(bits))] ^= 1 << generator.randrange(12, 23)
    return value


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return computed("forward", rows @ weight.T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (rows, weight), (gradient,) = ctx.saved_tensors, gradients
        return (
            computed("input gradient", gradient @ weight),
            computed("weight gradient", gradient.T @ rows),
        )


class Linear(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        product: Tensor = Product.apply(rows, self.weight)  # type: ignore[no-untyped-call]
        return product + self.bias


class InLayers(ls.Hook):
    """Makes one rank compute wrong in the layers of other models: in `nn.Linear`, and in its part
    of a sum over the ranks of `tensor`."""

    def __init__(self, rank: int, begin: int) -> None:
        self.rank, self.begin = rank, begin
        self.right = nn.Linear.forward, sliced.tree_sum

    def before_step(self, run: Any) -> None:
        linear, tree_sum = self.right

        def almost(layer: nn.Linear, rows: Tensor) -> Tensor:
            return linear(layer, rows) * (1 + 2**-20)

        def almost_sum(parts: Any) -> Tensor:
            return tree_sum(parts) * (1 + 2**-20)

        if run.rank == self.rank and run.step >= self.begin:
            nn.Linear.forward, sliced.tree_sum = almost, almost_sum  # type: ignore[method-assign]

    def on_end(self, run: Any) -> None:
        nn.Linear.forward, sliced.tree_sum = self.right  # type: ignore[method-assign]


class Planted(ls.Hook):
    """Gives one rank a fault."""

    def __init__(self, rank: int, **fault: Any) -> None:
        self.rank, self.fault = rank, fault

    def on_start(self, run: Any) -> None:
        FAULT[:] = [Fault(**self.fault)] if run.rank == self.rank else []

    def before_step(self, run: Any) -> None:
        for fault in FAULT:
            fault.step = run.step

    def on_end(self, run: Any) -> None:
        FAULT.clear()


def deep() -> nn.Module:
    """Four layers with parameters, for as many stages."""
    hidden = [layer for _ in range(2) for layer in (Linear(16, 16), nn.Tanh())]
    return nn.Sequential(Linear(6, 16), nn.Dropout(0.1), *hidden, Linear(16, 3))


def network(width: int = 16) -> nn.Module:
    return nn.Sequential(
        Linear(6, width),
        nn.Tanh(),
        nn.Dropout(0.1),
        Linear(width, width),
        nn.Tanh(),
        Linear(width, 3),
    )
