"""Helpers for torch's deterministic mode, which numerics=bitwise uses on accelerators: explains
torch's errors for operations without a deterministic kernel, and stops torch from filling new
tensors."""

from __future__ import annotations

import re

import torch

from lockstep.base.errors import PlanError
from lockstep.training.hook import Hook
from lockstep.training.run import Run

_REFUSED = re.compile(r"^(.+?) does not have a deterministic implementation", re.MULTILINE)
INSTEAD = {
    "nll_loss2d": (
        "F.cross_entropy(scores.movedim(1, -1).flatten(0, -2), targets.flatten()) has the same mean"
    ),
    "adaptive_avg_pool": (
        "F.avg_pool2d(x, (height // rows, width // columns)) is the same if the sizes divide"
    ),
    "adaptive_max_pool": (
        "F.max_pool2d(x, (height // rows, width // columns)) is the same if the sizes divide"
    ),
    "max_unpooling": (
        "torch.zeros(n, c, size).scatter(-1, indices.flatten(2), x.flatten(2)) is the same"
    ),
    "reflection_pad": "x.index_select(dim, indices), with the reflected indices, is the same",
    "bincount": "torch.zeros(length).index_add_(0, indices, weights) is the same",
    "median": "x.sort(dim).values.select(dim, (n - 1) // 2) is the same",
    "put_": "x.view(-1).index_copy_(0, indices, values) is the same",
}
"""Part of the name of an operation without a deterministic kernel -> deterministic code to write
instead."""


def error_of_determinism(error: BaseException | None, plan: object) -> PlanError | None:
    """Return a `PlanError` that explains `error`, if torch raised it because an operation has no
    deterministic kernel, and the plan has numerics=bitwise; None for any other error."""
    if not isinstance(error, RuntimeError) or not (found := _REFUSED.search(str(error))):
        return None
    name = found.group(1)
    instead = next((f"{text}; or " for part, text in INSTEAD.items() if part in name), "")
    return PlanError(
        f"{plan}: torch has no implementation of {name} whose result repeats, and numerics=bitwise"
        f" needs one; {instead}compute that operation on the CPU, or leave numerics=bitwise out"
    )


class FillsInFirstStep(Hook):
    """Stops torch from filling new tensors with NaN after the first step. In deterministic mode
    torch fills every new tensor, which takes a tenth of a step's time. If code reads a
    floating-point tensor before writing it and the value reaches the loss, the loss of the first
    step is NaN, which is refused."""

    def after_step(self, run: Run) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is a module's property
