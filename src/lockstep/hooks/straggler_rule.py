"""Who is slower than the others, and in what: from how long each rank was at each part of its steps. Pure, and n log n in the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PARTS = ("data", "compute", "hooks")
"""The parts of a step that a rank does by itself. Collectives take as long as the slowest rank makes them."""
TIMES = 1.15
"""A rank is a straggler if its own work takes this many times the others'."""
LONG_SECONDS = 10.0
WINDOWS = 3
"""At least so long, and so many windows, are looked at together."""

Times = NDArray[np.float64]
"""(parts, ranks): seconds a step, between two logging steps, in the order of `PARTS`."""


@dataclass(frozen=True, slots=True)
class Straggler:
    rank: int
    part: str
    """The one of `PARTS` with most of the difference."""
    seconds: float
    """A step, in that part."""
    usual_seconds: float
    """The median of the others."""
    times: float
    """The ratio of its own work's time to the others'."""


class StragglerFinder:
    """Finds the stragglers of a run, window by window."""

    def __init__(self, peers: Sequence[int]) -> None:
        """`peers`: of each rank; those of one number do the same work."""
        self._peers = peers
        self._windows: deque[tuple[float, Times]] = deque()
        self._told: set[tuple[int, str]] = set()

    def look(self, times: Times, seconds: float) -> list[Straggler]:
        """`seconds`: that the window lasted. Each straggler is named once for each part, until it is slow no more."""
        self._windows.append((seconds, times))
        if len(self._windows) < WINDOWS or sum(seconds for seconds, _ in self._windows) < LONG_SECONDS:
            return []
        lengths = [seconds for seconds, _ in self._windows]
        found = slow(np.average([times for _, times in self._windows], axis=0, weights=lengths), self._peers)
        while len(self._windows) > WINDOWS and sum(seconds for seconds, _ in self._windows) - self._windows[0][0] >= LONG_SECONDS:
            self._windows.popleft()
        now = {(each.rank, each.part) for each in found}
        new = [each for each in found if (each.rank, each.part) not in self._told]
        self._told = now
        return new


def slow(times: Times, peers: Sequence[int]) -> list[Straggler]:
    """Those whose own work takes longer than that of the others who do the same."""
    found = []
    for peer in sorted(set(peers)):
        ranks = np.flatnonzero(np.asarray(peers) == peer)
        if len(ranks) < 2:
            continue
        parts = times[:, ranks]
        own = parts.sum(axis=0)
        usual = _median_of_the_others(own)
        usual_parts = np.stack([_median_of_the_others(part) for part in parts])
        for place in np.flatnonzero(own > TIMES * usual):
            most = int(np.argmax(parts[:, place] - usual_parts[:, place]))
            factor = own[place] / max(usual[place], 1e-9)
            seconds, usually = float(parts[most, place]), float(usual_parts[most, place])
            found.append(Straggler(int(ranks[place]), PARTS[most], seconds, usually, float(factor)))
    return sorted(found, key=lambda each: each.rank)


def _median_of_the_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each of two or more values, the median of all but it."""
    order = np.argsort(values)
    place = np.empty_like(order)
    place[order] = np.arange(len(values))
    middle = [(len(values) - 2) // 2, (len(values) - 1) // 2]
    ordered = values[order]
    medians: NDArray[np.float64] = sum(ordered[each + (each >= place)] for each in middle) / 2
    return medians
