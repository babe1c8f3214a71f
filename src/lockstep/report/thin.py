"""A curve of any length in as many points as a picture can show, without hiding what stood out. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.report.history import Series


@dataclass(frozen=True, slots=True)
class Point:
    """One value, or what several neighbours have in common."""

    first: int
    last: int
    """Steps."""
    count: int
    """Values, of which `not_finite` are NaN or infinite."""
    mean: float
    low: float
    high: float
    """Of those that are finite; NaN where none is."""
    not_finite: int

    @property
    def step(self) -> float:
        return (self.first + self.last) / 2


def thinned(series: Series, last: int, columns: int) -> list[Point]:
    """The series as it is, where it has no more than `columns` values; else its mean, least and greatest value in so many equal parts
    of the axis from 0 to `last`, empty ones left out."""
    pairs = list(zip(series.steps, series.values, strict=True))
    if len(pairs) <= columns:
        return [_point([pair]) for pair in pairs]
    points: list[Point] = []
    gathered: list[tuple[int, float]] = []
    column = -1
    for pair in pairs:
        place = min(columns - 1, pair[0] * columns // (last + 1))
        if place != column and gathered:
            points.append(_point(gathered))
            gathered = []
        column = place
        gathered.append(pair)
    return [*points, _point(gathered)]


def _point(pairs: list[tuple[int, float]]) -> Point:
    finite = [value for _, value in pairs if math.isfinite(value)]
    mean, low, high = (math.fsum(finite) / len(finite), min(finite), max(finite)) if finite else (math.nan,) * 3
    return Point(pairs[0][0], pairs[-1][0], len(pairs), mean, low, high, len(pairs) - len(finite))
