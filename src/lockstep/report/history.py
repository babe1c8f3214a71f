"""The history of a run, joined over restarts: metrics, step times of the ranks, and events."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.logging.run_files import RESERVED_NAMES
from lockstep.pages.chart import Series

RunState = Literal["ended", "running", "unfinished", "preempted", "failed"]

PHASES = ("step", "data", "compute", "communication")
"""Measured parts of a rank's step. The first phase is the whole step."""

MOST_SERIES = 1000
"""Largest number of metrics that are read. A page has a chart for each metric."""
LARGEST = 1e290
_MOST = 2**53
"""Largest integer that JavaScript represents exactly."""
_LONGEST_SECONDS = 1e9
_BEGINS = "run-started"
_ENDS: dict[str, RunState] = {
    "run-ended": "ended",
    "run-failed": "failed",
    "preempted": "preempted",
}


@dataclass(slots=True)
class Curves:
    """Contents of `metrics.jsonl`."""

    series: dict[str, Series] = field(default_factory=dict)
    first_time: float | None = None
    last_time: float | None = None
    last_step: int = 0
    progress: list[tuple[float, int]] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)


@dataclass(slots=True)
class RankTimes:
    """Contents of `ranks.jsonl`: mean seconds per step, by phase and rank."""

    steps: list[int] = field(default_factory=list)
    phases: dict[str, list[array[float]]] = field(
        default_factory=lambda: {phase: [] for phase in PHASES}
    )
    hosts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class LoadHistory:
    """Contents of `experts.jsonl`: the load of each expert over the training steps."""

    steps: list[int] = field(default_factory=list)
    layers: dict[str, list[array[float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankMemory:
    rank: int
    microseconds: list[int]
    bytes_by_cause: dict[str, list[int]]
    """Maps causes of allocations, such as activations, to their bytes over time."""
    peak_bytes: int
    peak_seconds: float
    peak_phase: str
    at_peak: dict[str, int]
    """Maps causes of allocations to their bytes at the highest total."""
    largest: list[tuple[int, str, str]]
    """The largest allocations at the peak, each with bytes, cause and name."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Contents of `profile/memory.json`."""

    steps: tuple[int, int]
    ranks: list[RankMemory]


@dataclass(frozen=True, slots=True)
class RunEvent:
    """A row of `events.jsonl`."""

    time: float
    kind: str
    step: int
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The time from a start of the run until it ends or stops writing."""

    began: float
    ended: float
    end: RunState | None


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that holds the run directory, read from the file `lock`."""

    pid: int
    host: str
    alive: bool | None
    """None if the process is on another host or in another container."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """All records in a run directory."""

    name: str
    path: str
    metadata: Mapping[str, Any]
    result: Mapping[str, Any] | None
    curves: Curves
    ranks: RankTimes
    events: list[RunEvent]
    holder: LockHolder | None
    loads: LoadHistory = field(default_factory=LoadHistory)
    memory: MemoryProfile | None = None
    unreadable: Mapping[str, int] = field(default_factory=dict)

    @property
    def state(self) -> RunState:
        if self.result is not None:
            return "ended"
        for event in reversed(self.events):
            if event.kind in _ENDS:
                return _ENDS[event.kind]
            if event.kind == _BEGINS:
                break
        return "running" if self.holder is not None and self.holder.alive else "unfinished"

    @property
    def attempts(self) -> list[Attempt]:
        """One attempt for each start of the run's processes. A recovery in place continues the same
        attempt."""
        recoveries = [
            (event.time - seconds_of(event, "open_seconds"), event.time)
            for event in self.events
            if event.kind == "recovered"
        ]
        starts = [
            index
            for index, event in enumerate(self.events)
            if event.kind == _BEGINS
            and not any(low <= event.time <= high for low, high in recoveries)
        ]
        found = []
        for index, following in zip(starts, [*starts, len(self.events)][1:], strict=True):
            own = self.events[index:following]
            end = next((_ENDS[event.kind] for event in reversed(own) if event.kind in _ENDS), None)
            if following == len(self.events):
                last = self.curves.last_time
            else:
                rows = bisect_left(self.curves.progress, (self.events[following].time, 0))
                last = self.curves.progress[rows - 1][0] if rows else None
            found.append(Attempt(own[0].time, max(own[-1].time, last or 0.0), end))
        return found

    @property
    def steps(self) -> int:
        if self.result is not None:
            return int(self.result.get("steps") or 0)
        return max(self.curves.last_step, self.events[-1].step if self.events else 0)

    @property
    def began(self) -> float | None:
        return min(self._times, default=None)

    @property
    def last_time(self) -> float | None:
        return max(self._times, default=None)

    @property
    def _times(self) -> list[float]:
        ends = [event.time for event in (*self.events[:1], *self.events[-1:])]
        rows = (self.curves.first_time, self.curves.last_time)
        return [*ends, *(time for time in rows if time is not None)]

    @property
    def plan(self) -> str:
        plan = self.metadata.get("plan")
        return str(plan.get("text", "")) if isinstance(plan, Mapping) else ""


def metric_curves(rows: Iterable[Mapping[str, Any]]) -> Curves:
    curves = Curves()
    for row in rows:
        step = row["step"]
        if step < curves.last_step:
            for series in curves.series.values():
                series.truncate(step)
        curves.last_step = step
        curves.first_time = row["time"] if curves.first_time is None else curves.first_time
        curves.last_time = row["time"]
        curves.progress.append((row["time"], step))
        not_finite = row.get("not_finite", {})
        for name, value in row.items():
            if name in RESERVED_NAMES:
                continue
            if name not in curves.series and len(curves.series) == MOST_SERIES:
                curves.left_out.add(name)
                continue
            number = float(not_finite.get(name, "nan")) if value is None else float(value)
            curves.series.setdefault(name, Series()).add(step, _clamp(number))
    # all values may have been discarded
    curves.series = {name: series for name, series in curves.series.items() if series.steps}
    return curves


def _clamp(number: float) -> float:
    """Replace very large numbers by infinity, and very small ones by 0."""
    if abs(number) > LARGEST:
        return math.copysign(math.inf, number)
    return 0.0 if abs(number) < 1 / LARGEST else number


def load_history(rows: Iterable[Mapping[str, Any]]) -> LoadHistory:
    history = LoadHistory()
    for row in rows:
        _add_row(history.steps, history.layers, row["step"], row["loads"])
    return history


def rank_times(rows: Iterable[Mapping[str, Any]]) -> RankTimes:
    times = RankTimes()
    for row in rows:
        values = {phase: row["ranks"].get(phase, ()) for phase in PHASES}
        _add_row(times.steps, times.phases, row["step"], values)
        times.hosts = list(map(str, row.get("hosts", times.hosts)))
    return times


def _add_row(
    steps: list[int],
    series: dict[str, list[array[float]]],
    step: int,
    values: Mapping[str, Iterable[float | None]],
) -> None:
    """Append a row. Discard the rows that a resumed run repeats."""
    while steps and steps[-1] >= step:
        steps.pop()
        for known in series.values():
            known.pop()
    for name in dict.fromkeys((*series, *values)):
        known = series.setdefault(name, [array("d")] * len(steps))
        known.append(array("d", (math.nan if x is None else x for x in values.get(name, ()))))
    steps.append(step)


def memory_profile(found: Mapping[str, Any]) -> MemoryProfile:
    ranks = [
        _rank_memory(rank, each) for rank, each in enumerate(found["ranks"]) if each is not None
    ]
    first, stop = found["steps"]
    return MemoryProfile((int(first), int(stop)), ranks)


def _rank_memory(rank: int, found: Mapping[str, Any]) -> RankMemory:
    moments = [_chart_number(1e6 * float(second)) for second in found["seconds"]]
    causes = {
        str(cause): [_chart_number(size) for size in sizes]
        for cause, sizes in found["bytes_by_cause"].items()
    }
    if not moments or not causes or any(len(sizes) != len(moments) for sizes in causes.values()):
        raise ValueError(
            "each cause needs one size for each moment, and at least one cause is needed"
        )
    if moments != sorted(moments):
        raise ValueError("moments do not go back")
    return RankMemory(
        rank=rank,
        microseconds=moments,
        bytes_by_cause=causes,
        peak_bytes=_chart_number(found["peak_bytes"]),
        peak_seconds=_chart_number(1e6 * float(found["peak_seconds"])) / 1e6,
        peak_phase=str(found["peak_phase"]),
        at_peak={cause: _chart_number(found["at_peak"][cause]) for cause in causes},
        largest=[
            (_chart_number(size), str(cause), str(name)) for size, cause, name in found["largest"]
        ],
    )


def _chart_number(number: float) -> int:
    if not 0 <= round(number) <= _MOST:
        raise ValueError(f"{number} is negative, or too large")
    return round(number)


def seconds_of(event: RunEvent, name: str) -> float:
    value = event.details.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < _LONGEST_SECONDS else 0.0


def run_events(rows: Iterable[Mapping[str, Any]]) -> list[RunEvent]:
    known = ("time", "event", "step")
    events = []
    for row in rows:
        details = {key: value for key, value in row.items() if key not in known}
        events.append(RunEvent(row["time"], row["event"], row["step"], details))
    return sorted(events, key=lambda event: event.time)
