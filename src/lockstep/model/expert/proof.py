"""Checks, in the first forward, that a module of experts that is divided over ranks computes the
same as with all experts on one rank. The tokens in the check are random rows. In the first half,
the rows choose random experts. In the second half, all rows choose the same experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import disable_current_modes
from lockstep.comm.agreed_errors import raise_on_all_ranks
from lockstep.comm.world import World
from lockstep.model.trial import tolerance

T = TypeVar("T")
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes the output of a module of experts from tokens, chosen experts and weights."""
ROWS = 32
RULE = (
    "the output of a token must be the sum over its experts of weight times expert(token), where"
    " expert(token) depends on the token's row and the expert's parameters alone: take no mean over"
    " rows, drop no rows (no capacity), use the index only to choose parameters, and read the"
    " number of experts from a parameter (self.up.shape[0]) or an attribute such as num_experts"
)


def prove_experts(
    name: str,
    divided: Compute,
    whole: Compute,
    alone: Compute | None,
    *,
    experts: int,
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    world: World,
) -> None:
    """Every rank of the axis `expert` must call this function. If the check fails, all ranks raise
    the same error. `whole` is the module's original forward with all experts. `alone` is the
    divided forward on one rank with all experts, and its bits must equal the bits of `divided`."""
    generator = torch.Generator().manual_seed(world.rank)
    rows = 2 * ROWS
    scores = torch.rand(rows, experts, generator=generator)
    scores[ROWS:] = torch.linspace(1, 0, experts)
    weighing, random_index = scores.topk(index.shape[1])
    given = (
        torch.randn(rows, tokens.shape[1], generator=generator).to(tokens),
        random_index.to(index),
        weighing.to(weights),
    )
    with (
        disable_current_modes(),
        saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        torch.enable_grad(),
        accelerator.preserved_generators(tokens.device),
    ):
        before = _states(tokens.device)
        found = _with_gradients(divided, *given)
        draws = any(
            not torch.equal(one, other)
            for one, other in zip(before, _states(tokens.device), strict=True)
        )
        expected = on_all_ranks(world, name, lambda: _with_gradients(whole, *given))
        same = found if alone is None else _with_gradients(alone, *given)
    if world.any(draws):
        raise RecipeError(
            f"{name} draws random numbers, as dropout does, and its rows are computed on the ranks"
            f" that hold their experts (expert={world.size}), which would draw other numbers than"
            " one process; draw them around the experts: F.dropout(self.experts(...), p,"
            " self.training)"
        )
    _check_close(name, found, expected, world)
    if world.any(not all(map(torch.equal, found, same))):
        raise RecipeError(
            f"{name} computes other bits for a row when it has only some of the experts"
            f" (expert={world.size}, numerics=bitwise), as torch.nn.functional.grouped_mm does;"
            " compute one expert after another, with a product of its rows and its parameters, or"
            " choose numerics=fast"
        )


def _check_close(name: str, found: list[Tensor], expected: list[Tensor], world: World) -> None:
    parts = ["its output", "the gradient of its tokens", "the gradient of its weights"]
    for part, one, other in zip(parts, found, expected, strict=True):
        allowed = tolerance(other)
        off = [
            each
            for each in world.gather_values(_difference(one, other))
            if isinstance(each, float) and not each <= allowed
        ]
        if off:
            raise RecipeError(
                f"{name} computes something else when each rank holds some of its experts"
                f" (expert={world.size}): {part} differs by {max(off):.1g} of its size, where"
                f" rounding explains {allowed:.1g}; {RULE}; or leave expert out of the plan"
            )


def on_all_ranks(world: World, name: str, compute: Callable[[], T]) -> T:
    """Return `compute()`. Every rank must call this function. All ranks raise `RecipeError` if
    `compute` fails on any rank."""

    def compute_named() -> T:
        try:
            return compute()
        except Exception as error:
            raise RecipeError(
                f"{name} fails when each rank holds some of its experts (expert={world.size}):"
                f" {type(error).__name__}: {error}; {RULE}"
            ) from error

    return raise_on_all_ranks(world, compute_named, RecipeError)


def _with_gradients(
    compute: Compute, tokens: Tensor, index: Tensor, weights: Tensor
) -> list[Tensor]:
    inputs = tokens.detach().requires_grad_(), weights.detach().requires_grad_()
    output = compute(inputs[0], index, inputs[1])
    factors = torch.linspace(0.5, 1.5, output.numel()).view(output.shape).to(output)
    gradients = torch.autograd.grad(output, inputs, factors, allow_unused=True)
    filled = [
        torch.zeros_like(each) if gradient is None else gradient
        for each, gradient in zip(inputs, gradients, strict=True)
    ]
    return [output.detach(), *filled]


def _states(device: torch.device) -> list[Tensor]:
    return [each.get_state() for each in accelerator.generators_of([device])]


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    if torch.equal(found, expected):
        return 0.0
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)
