"""Explains the errors of torch's deterministic mode, and stops the mode from filling new tensors.
numerics=bitwise uses the mode on accelerators."""

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
"""Maps a part of an operation's name to deterministic code that replaces the operation."""


def error_of_determinism(error: BaseException | None, plan: object) -> PlanError | None:
    if not isinstance(error, RuntimeError) or not (found := _REFUSED.search(str(error))):
        return None
    name = found.group(1)
    instead = next((f"{text}; or " for part, text in INSTEAD.items() if part in name), "")
    return PlanError(
        f"{plan}: torch has no implementation of {name} whose result repeats, and numerics=bitwise"
        f" needs one; {instead}compute that operation on the CPU, or leave numerics=bitwise out"
    )


class FillsInFirstStep(Hook):
    """Stops torch from filling new tensors with NaN after the first step. Filling new tensors with
    NaN takes a tenth of the step time. If code reads a tensor before writing it, the first step's
    loss is NaN, which raises an error."""

    def after_step(self, run: Run) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is a module's property
