"""Who is slower than the others, and in what: from how long each rank was at each part of its steps. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

PARTS = ("data", "compute", "hooks")
"""What a rank does by itself. Exchanges are as long as the slowest makes them."""
TIMES = 1.15
"""So much longer than the others', in all that a rank does by itself, is slow."""
LONG_SECONDS = 10.0
WINDOWS = 3
"""At least so long, and so many windows, are looked at together."""


@dataclass(frozen=True, slots=True)
class Row:
    """Of one rank, between two logging steps: seconds a step."""

    step: float
    data: float
    compute: float
    hooks: float
    communication: float
    peer: Hashable = None
    """Ranks of one mark do the same work."""

    @property
    def own(self) -> float:
        return self.data + self.compute + self.hooks


@dataclass(frozen=True, slots=True)
class Straggler:
    rank: int
    part: str
    """Of `PARTS`: where most of it is."""
    seconds: float
    """A step, in that part."""
    usual_seconds: float
    """The median of the others."""
    times: float
    """How much longer its own work takes than the others'."""


@dataclass(slots=True)
class Stragglers:
    """Of a run. Told of each window, it says who has become one."""

    _windows: deque[tuple[float, Sequence[Row]]] = field(default_factory=deque)
    """The latest, that are long together."""
    _told: set[tuple[int, str]] = field(default_factory=set)

    def look(self, rows: Sequence[Row], seconds: float) -> list[Straggler]:
        """`rows`: of each rank. `seconds`: that the window lasted. Each is named once for each part, until it is slow no more."""
        self._windows.append((seconds, rows))
        if len(self._windows) < WINDOWS or sum(seconds for seconds, _ in self._windows) < LONG_SECONDS:
            return []
        found = slow([_mean([(seconds, rows[rank]) for seconds, rows in self._windows]) for rank in range(len(rows))])
        while len(self._windows) > WINDOWS and sum(seconds for seconds, _ in self._windows) - self._windows[0][0] >= LONG_SECONDS:
            self._windows.popleft()
        now = {(each.rank, each.part) for each in found}
        new = [each for each in found if (each.rank, each.part) not in self._told]
        self._told = now
        return new


def _mean(windows: Sequence[tuple[float, Row]]) -> Row:
    """Of one rank's rows, each as long as its window was."""
    whole = sum(seconds for seconds, _ in windows)
    means = {name: sum(seconds * getattr(row, name) for seconds, row in windows) / whole for name in (*PARTS, "step", "communication")}
    return Row(**means, peer=windows[-1][1].peer)


def slow(rows: Sequence[Row]) -> list[Straggler]:
    """Those whose own work takes longer than that of the others who do the same."""
    found = []
    for rank, row in enumerate(rows):
        others = [other for place, other in enumerate(rows) if place != rank and other.peer == row.peer]
        if not others:
            continue
        usual = statistics.median(other.own for other in others)
        if row.own <= TIMES * usual:
            continue
        excess = {part: getattr(row, part) - statistics.median(getattr(other, part) for other in others) for part in PARTS}
        part = max(excess, key=lambda name: excess[name])
        found.append(Straggler(rank, part, getattr(row, part), getattr(row, part) - excess[part], row.own / max(usual, 1e-9)))
    return found
