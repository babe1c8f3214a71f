"""From times to figures: pure, and of no library."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    """The median of ratios taken round by round, and their middle half."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, own: Sequence[float], baseline: Sequence[float]) -> Ratio:
        """Of two sides of which each pair was measured in the same round."""
        ratios = [mine / other for mine, other in zip(own, baseline, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return cls(statistics.median(ratios), low, high)


def furthest(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """The largest relative distance of two loss curves. A loss that is no number is infinitely far."""
    distances = [abs(mine - other) / abs(other) for mine, other in zip(losses, baseline, strict=True)]
    return max(distance if distance == distance else float("inf") for distance in distances)
