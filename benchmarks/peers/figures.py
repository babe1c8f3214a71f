"""Turns times into figures. Pure, without any library."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    """The median of the rounds' ratios, and their interquartile range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, own: Sequence[float], baseline: Sequence[float]) -> Ratio:
        """Return the ratio of two sides whose measurements are paired by round."""
        ratios = [mine / other for mine, other in zip(own, baseline, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return cls(statistics.median(ratios), low, high)


def furthest(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the largest relative distance between two loss curves; infinite if a loss is not a
    number."""
    distances = [
        abs(mine - other) / abs(other) for mine, other in zip(losses, baseline, strict=True)
    ]
    return max(distance if distance == distance else float("inf") for distance in distances)
