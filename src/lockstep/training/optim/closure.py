"""Optimizers that compute the loss and its gradient more than once a step: LBFGS, SAM."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch.optim import Optimizer

from lockstep.base.errors import RecipeError
from lockstep.plan import Plan


def needs_closure(optimizer: Optimizer) -> bool:
    """True if its `step` cannot be called without a closure, or if its class says so by
    `needs_closure = True`."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return bool(getattr(optimizer, "needs_closure", False)) or (
        closure is not None and closure.default is inspect.Parameter.empty
    )


def check_closures(
    optimizers: Sequence[Optimizer], plan: Plan, *, precision: str, gradient_compression: str
) -> None:
    """Raise `RecipeError` if an optimizer needs a closure and cannot have one."""
    found = next(filter(needs_closure, optimizers), None)
    if found is None:
        return
    others = plan.state_divided
    others += ["fp16"] * (precision == "fp16") + [
        f"gradient_compression={gradient_compression!r}"
    ] * (gradient_compression != "none")
    others += [f"{len(optimizers)} optimizers for one model"] * (len(optimizers) > 1)
    if others:
        raise RecipeError(
            f"{type(found).__name__} with {', '.join(others)}; it computes the gradient more than"
            " once a step, by a closure, and needs all parameters on each process, one optimizer"
            " for a model, and gradients as they are; use replicate, without these"
        )
