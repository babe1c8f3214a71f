"""Downsample a series to the points that a chart can show.

The minimum and maximum are kept, so that no outlier is hidden. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.report.history import Series


@dataclass(frozen=True, slots=True)
class DownsampledPoint:
    """One value, or the mean, minimum and maximum of neighbouring values."""

    first: int
    last: int
    count: int
    mean: float
    """Mean of the finite values; NaN if there are none. The same holds for `low` and `high`."""
    low: float
    high: float
    not_finite: int

    @property
    def step(self) -> float:
        return (self.first + self.last) / 2


def downsample(series: Series, last: int, columns: int) -> list[DownsampledPoint]:
    """Return the series as `columns` points at most, each of an equal part of the axis. Empty parts are left out."""
    pairs = list(zip(series.steps, series.values, strict=True))
    if len(pairs) <= columns:
        return [_point([pair]) for pair in pairs]
    points: list[DownsampledPoint] = []
    collected: list[tuple[int, float]] = []
    column = -1
    for pair in pairs:
        index = min(columns - 1, pair[0] * columns // (last + 1))
        if index != column and collected:
            points.append(_point(collected))
            collected = []
        column = index
        collected.append(pair)
    return [*points, _point(collected)]


def _point(pairs: list[tuple[int, float]]) -> DownsampledPoint:
    finite = [value for _, value in pairs if math.isfinite(value)]
    mean, low, high = (math.fsum(finite) / len(finite), min(finite), max(finite)) if finite else (math.nan,) * 3
    return DownsampledPoint(pairs[0][0], pairs[-1][0], len(pairs), mean, low, high, len(pairs) - len(finite))
