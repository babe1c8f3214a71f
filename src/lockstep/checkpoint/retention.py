"""Retention of checkpoints: which ones to delete. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Literal

from lockstep.checkpoint.storage import CheckpointName


def checkpoints_to_delete(
    names: Collection[CheckpointName],
    *,
    newest: CheckpointName,
    last: int,
    every: int | None = None,
    scores: Mapping[CheckpointName, float] | None = None,
    mode: Literal["min", "max"] = "min",
) -> list[CheckpointName]:
    """The checkpoints to delete among the complete ones, `names`, in order. Call it only after the checkpoint `newest` is committed.

    Kept are the `last` newest (at least 1), those at multiples of `every` steps, and the one with the best of `scores`: the smallest,
    or the largest if `mode` is `max`; the earliest of equal ones. NaN is no score, and a checkpoint needs none. Checkpoints after
    `newest` were found damaged when the run was resumed: they are neither counted nor deleted.
    """
    ordered = sorted(name for name in names if name <= newest)
    kept = set(ordered[-last:])
    if every is not None:
        kept |= {name for name in ordered if name.step % every == 0}
    found = {name: scores[name] for name in ordered if name in scores and not math.isnan(scores[name])} if scores is not None else {}
    if found:
        kept.add((min if mode == "min" else max)(found, key=found.__getitem__))
    return [name for name in ordered if name not in kept]
