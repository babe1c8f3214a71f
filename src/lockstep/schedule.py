"""Learning-rate schedules: pure functions from the step to a multiplier of every learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable

from lockstep.base.errors import RecipeError


def warmup_cosine(*, warmup: int, total: int, floor: float = 0.0) -> Callable[[int], float]:
    """Return a schedule: linear warmup over `warmup` steps, then a half cosine down to the
    multiplier `floor` at step `total`. After step `total`, the multiplier is `floor`. (Loshchilov
    and Hutter, SGDR, 2017, without restarts.) Raises `RecipeError`."""
    if not 0 <= warmup <= total or total < 1:
        raise RecipeError(
            f"warmup={warmup} and total={total}; both count steps, and 0 <= warmup <= total, with"
            " total at least 1"
        )
    if not 0 <= floor <= 1:
        raise RecipeError(
            f"floor={floor}; it must be a multiplier of the learning rate from 0 to 1"
        )

    def multiplier(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if step >= total:
            return floor
        return floor + (1 - floor) * 0.5 * (
            1 + math.cos(math.pi * (step - warmup) / (total - warmup))
        )

    return multiplier
