"""Which checkpoints a run no longer needs. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Literal

from lockstep.checkpoint.folder import Name


def retired(
    names: Collection[Name],
    *,
    newest: Name,
    last: int,
    every: int | None = None,
    scores: Mapping[Name, float] | None = None,
    mode: Literal["min", "max"] = "min",
) -> list[Name]:
    """Of the complete checkpoints `names`, those to delete, in order. Called once another, `newest`, is complete, never before.

    What stands behind `newest` was damaged, or the run would have gone on from there: it neither counts nor goes.
    Kept are the `last` ones (at least 1), those at multiples of `every` steps, and the one with the best of `scores`, the least or (`mode`)
    the most: of equal ones the first; NaN is no score. A checkpoint needs no score.
    """
    ordered = sorted(name for name in names if name <= newest)
    kept = set(ordered[-last:])
    if every is not None:
        kept |= {name for name in ordered if name.step % every == 0}
    found = {name: scores[name] for name in ordered if name in scores and not math.isnan(scores[name])} if scores is not None else {}
    if found:
        kept.add((min if mode == "min" else max)(found, key=found.__getitem__))
    return [name for name in ordered if name not in kept]
