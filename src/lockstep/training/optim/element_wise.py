"""Finds optimizers whose update of an element depends on other elements of its tensor: Muon, Adafactor, LAMB."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import disable_current_modes
from lockstep.plan import Plan

ROWS, COLUMNS, STEPS = 8, 12, 3
TOLERANCE = 1e-3
"""Largest relative difference between the updates of a tensor and of its halves, which is rounding."""


def needing_whole_tensors(optimizers: Sequence[Optimizer], plan: Plan) -> list[Optimizer]:
    """The optimizers that a `WholeTensorOptimizer` must step, because the plan shards tensors that they need whole.
    Raises `RecipeError` if the plan splits tensors in a way in which it cannot."""
    if plan.shard == 1 and plan.tensor == 1:
        return []
    found = [optimizer for optimizer in optimizers if not is_element_wise(optimizer)]
    if found and (plan.tensor != 1 or plan.offload or plan.pipeline != 1):
        cuts = [f"{axis}={getattr(plan, axis)}" for axis in ("shard", "tensor", "pipeline") if getattr(plan, axis) != 1]
        raise RecipeError(
            f"{type(found[0]).__name__} with {','.join([*cuts, *(['offload=yes'] if plan.offload else [])])}; its update of an element "
            "depends on the other elements of the tensor, which are on other ranks; use replicate, shard or both, or an optimizer that "
            "updates each element by itself, such as AdamW"
        )
    return found


def is_element_wise(optimizer: Optimizer) -> bool:
    """True if the optimizer updates the two halves of a tensor as it updates the tensor. Tried on a copy of each of its
    groups, with a small tensor. Raises `RecipeError` if it cannot be tried."""
    for group in optimizer.param_groups:
        dims = max((parameter.dim() for parameter in group["params"]), default=0)
        if dims and _differs(optimizer, group, (ROWS, COLUMNS) if dims > 1 else (ROWS,)):
            return False
    return True


def _differs(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...]) -> bool:
    with disable_current_modes():  # a trial needs values, also where the model has none
        generator = torch.Generator().manual_seed(0)
        device = next((each.device for each in group["params"] if not each.is_meta), "cpu")
        start, *gradients = (torch.randn(shape, generator=generator).to(device) for _ in range(1 + STEPS))
        try:
            whole = updated(optimizer, group, start, gradients)
            halves = [updated(optimizer, group, *_half(start, gradients, part)) for part in (0, 1)]
        except Exception as error:
            raise _cannot_try(optimizer, f"its step raises {type(error).__name__}: {error}") from error
        moved = (whole - start).norm()
        if not moved:
            raise _cannot_try(optimizer, f"{STEPS} steps leave a parameter as it is")
        return bool((whole - torch.cat(halves)).norm() > TOLERANCE * moved)


def _cannot_try(optimizer: Optimizer, why: str) -> RecipeError:
    return RecipeError(
        f"{type(optimizer).__name__} cannot be tried on a small tensor ({why}), and the plan splits tensors over ranks; if its update of "
        "an element depends on the other elements, each rank would compute it from a part of them; let step() take parameters from "
        "self.param_groups and their state from self.state, and update any tensor that has a gradient; or use replicate"
    )


def _half(start: Tensor, gradients: Sequence[Tensor], part: int) -> tuple[Tensor, list[Tensor]]:
    return start.chunk(2)[part].clone(), [gradient.chunk(2)[part].clone() for gradient in gradients]


def updated(optimizer: Optimizer, group: dict[str, Any], start: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return the tensor after a step with each of the gradients, taken by a copy of the optimizer on this group."""
    parameter = torch.nn.Parameter(start.clone())
    copied: Optimizer = object.__new__(type(optimizer))
    vars(copied).update(vars(optimizer))
    frozen = group.get("lr") is not None and not float(group["lr"])
    copied.param_groups = [{**group, **({"lr": 1e-3} if frozen else {}), "params": [parameter]}]
    copied.state = defaultdict(dict)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        copied.step()
    return parameter.detach()
