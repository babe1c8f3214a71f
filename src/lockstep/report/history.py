"""What a run did: its curves, the times of its ranks, its events. Joined over resumptions, from rows as they were written. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ended", "running", "unfinished", "preempted", "failed"]

PARTS = ("step", "data", "compute", "communication")
"""Of the time of a rank's step: the whole, and what it is made of."""

_NOT_METRICS = frozenset({"step", "time", "not_finite"})
_LARGEST = 1e290
_BEGINS = "run-started"
_ENDS: dict[str, State] = {"run-ended": "ended", "run-failed": "failed", "preempted": "preempted"}


@dataclass(slots=True)
class Series:
    """Numbers by the steps done when they were measured, in rising order. A value may be NaN or infinite."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """What was known of this step and later ones counts no more."""
        self.cut(step)
        self.steps.append(step)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Forget this step and later ones."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()

    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]


@dataclass(slots=True)
class Curves:
    """What `metrics.jsonl` says."""

    series: dict[str, Series] = field(default_factory=dict)
    first_time: float | None = None
    last_time: float | None = None
    """Of the first and of the last row, in seconds since 1970."""
    last_step: int = 0


@dataclass(slots=True)
class RankTimes:
    """What `ranks.jsonl` says: mean seconds of a step, by part of it and rank, from one logging step to the next."""

    steps: list[int] = field(default_factory=list)
    parts: dict[str, list[array[float]]] = field(default_factory=lambda: {part: [] for part in PARTS})
    """Of each part, for each of the steps, a number a rank; none where it was not measured."""
    hosts: list[str] = field(default_factory=list)
    """Of each rank, at last."""


@dataclass(frozen=True, slots=True)
class Happened:
    """An event, when it was written down."""

    time: float
    """Seconds since 1970."""
    kind: str
    step: int
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attempt:
    """From a start of the run to its end, or to the last that was heard of it."""

    began: float
    ended: float
    """Seconds since 1970."""
    end: State | None
    """None: nothing was said."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the run directory, as its file `lock` says."""

    pid: int
    host: str
    alive: bool | None
    """None: on another host, from where it cannot be seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All that is known of a run."""

    name: str
    path: str
    facts: Mapping[str, Any]
    """run.json."""
    result: Mapping[str, Any] | None
    """result.json, where the run has ended."""
    curves: Curves
    ranks: RankTimes
    events: list[Happened]
    holder: Holder | None
    unreadable: Mapping[str, int] = field(default_factory=dict)
    """Lines that are not as a run writes them, by file."""

    @property
    def state(self) -> State:
        if self.result is not None:
            return "ended"
        told = next((event.kind for event in reversed(self.events) if event.kind in _ENDS or event.kind == _BEGINS), None)
        if told in _ENDS:
            return _ENDS[told]
        return "running" if self.holder is not None and self.holder.alive else "unfinished"

    @property
    def attempts(self) -> list[Attempt]:
        return attempts(self.events, self.curves.last_time)

    @property
    def steps(self) -> int:
        """Done, as far as is known."""
        if self.result is not None:
            return int(self.result.get("steps", 0))
        return max(self.curves.last_step, self.events[-1].step if self.events else 0)

    @property
    def began(self) -> float | None:
        """Seconds since 1970; None where nothing was written."""
        return min(self._times, default=None)

    @property
    def heard(self) -> float | None:
        """When something was last written, as `began`."""
        return max(self._times, default=None)

    @property
    def _times(self) -> list[float]:
        ends = (self.curves.first_time, self.curves.last_time, *(event.time for event in (*self.events[:1], *self.events[-1:])))
        return [time for time in ends if time is not None]

    @property
    def plan(self) -> str:
        plan = self.facts.get("plan")
        return str(plan.get("text", "")) if isinstance(plan, Mapping) else ""


def curves(rows: Iterable[Mapping[str, Any]]) -> Curves:
    """Join the rows of `metrics.jsonl`. Where the steps go back, the run was resumed, and the earlier rows of later steps count no more."""
    found = Curves()
    for row in rows:
        step = row["step"]
        if step < found.last_step:
            for series in found.series.values():
                series.cut(step)
        found.last_step = step
        found.first_time = row["time"] if found.first_time is None else found.first_time
        found.last_time = row["time"]
        not_finite = row.get("not_finite", {})
        for name, value in row.items():
            if name not in _NOT_METRICS:
                number = float(not_finite.get(name, "nan")) if value is None else float(value)
                found.series.setdefault(name, Series()).add(step, _within(number))
    return found


def _within(number: float) -> float:
    """The number, where one can reckon with it: above `_LARGEST` it counts as infinite, below 1 / `_LARGEST` as 0."""
    if abs(number) > _LARGEST:
        return math.copysign(math.inf, number)
    return 0.0 if abs(number) < 1 / _LARGEST else number


def rank_times(rows: Iterable[Mapping[str, Any]]) -> RankTimes:
    """Join the rows of `ranks.jsonl`, as `curves` does."""
    found = RankTimes()
    for row in rows:
        while found.steps and found.steps[-1] >= row["step"]:
            found.steps.pop()
            for rows_of_part in found.parts.values():
                rows_of_part.pop()
        found.steps.append(row["step"])
        for part in PARTS:
            found.parts[part].append(array("d", (math.nan if value is None else value for value in row["ranks"].get(part, ()))))
        found.hosts = list(map(str, row.get("hosts", found.hosts)))
    return found


def happened(rows: Iterable[Mapping[str, Any]]) -> list[Happened]:
    """The rows of `events.jsonl`, in order of their times."""
    said = ("time", "event", "step")
    events = [Happened(row["time"], row["event"], row["step"], {key: row[key] for key in row if key not in said}) for row in rows]
    return sorted(events, key=lambda event: event.time)


def attempts(events: list[Happened], last_time: float | None) -> list[Attempt]:
    """Each start of the run. `last_time`: of the last row of metrics; None: there is none."""
    starts = [place for place, event in enumerate(events) if event.kind == _BEGINS]
    found = []
    for place, following in zip(starts, [*starts, len(events)][1:], strict=True):
        mine = events[place:following]
        end = next((_ENDS[event.kind] for event in reversed(mine) if event.kind in _ENDS), None)
        ended = mine[-1].time
        if following == len(events) and last_time is not None:
            ended = max(ended, last_time)
        found.append(Attempt(mine[0].time, ended, end))
    return found
