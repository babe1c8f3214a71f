"""The number of processes to start on this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from lockstep.base.errors import LaunchError
from lockstep.plan import Plan, Size


def count_processes(
    asked: str | int, plan: Plan | None, count_gpus: Callable[[], int], *, name: str
) -> int:
    """The number of processes for `asked`: a number, `auto` or `gpu`. `name`: the option's name in
    errors.

    `auto` is the product of the plan's axes if all of them have a size; otherwise one process per
    GPU, or one if there is no GPU. `count_gpus` is called only if needed. Raises `LaunchError`, and
    `PlanError` if the plan's axes do not multiply to the number.
    """
    sizes: list[Size] = list(plan.axis_sizes.values()) if plan is not None else ["auto"]
    if asked == "auto":
        number = (
            max(1, count_gpus())
            if "auto" in sizes
            else math.prod(size for size in sizes if size != "auto")
        )
    elif asked == "gpu":
        number = count_gpus()
        if number == 0:
            raise LaunchError(
                f"{name}gpu; it starts one process per GPU, and {_why_no_gpu()}; give a number, or"
                " auto"
            )
    else:
        number = _number(asked, name)
    if plan is not None:
        plan.resolve(number)
    return number


def _why_no_gpu() -> str:
    """Return why torch sees no GPU."""
    from lockstep.base import accelerator  # imports torch

    return accelerator.unseen(os.environ) or "torch sees no GPU here"


def _number(asked: str | int, name: str) -> int:
    try:
        number = int(asked)
    except ValueError:
        number = 0
    if number < 1 or isinstance(asked, bool):
        raise LaunchError(
            f"{name}{asked}; it takes a whole number of processes, at least 1, or auto (from the "
            "plan, else one per GPU, else 1), or gpu (one per GPU); give one of those"
        )
    return number
