"""Measures the phases of a rank's work, such as data loading or the forward."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from lockstep.comm.torch_collectives import waits

T = TypeVar("T")
WAITING_FOR_DEVICE = "waiting for the device"
_MAX_EVENTS = 256
"""Number of CUDA events above which completed events are reused."""
FADES = 0.95
"""Factor by which the recorded longest duration decreases each time a phase ends."""


@dataclass(slots=True)
class _PhaseSeconds:
    total: float = 0.0
    waited: float = 0.0
    usual: float = 0.0
    has_ended: bool = False


class StreamTimes:
    """Times of phases on the stream of a GPU. Times on the host would be wrong, because the host
    only queues work."""

    def __init__(self, create_event: Callable[[], torch.Event]) -> None:
        self._create_event = create_event
        self._events: deque[tuple[str, torch.Event]] = deque()
        self._spare: list[torch.Event] = []
        self._totals: defaultdict[str, float] = defaultdict(float)

    def enter(self, name: str) -> None:
        """Enter a phase. GPU work that is queued after the call belongs to the phase."""
        event = self._spare.pop() if self._spare else self._create_event()
        event.record()
        self._events.append((name, event))
        while len(self._events) > _MAX_EVENTS and self._events[1][1].query():
            self._add_first()

    def totals(self) -> defaultdict[str, float]:
        if self._events:
            self._events[-1][1].synchronize()
            while len(self._events) > 1:
                self._add_first()
        return self._totals

    def _add_first(self) -> None:
        name, began = self._events.popleft()
        self._totals[name] += began.elapsed_time(self._events[0][1]) / 1e3
        self._spare.append(began)


class Phases:
    """The training thread enters phases. Any thread may read the phases."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.name = "set-up"
        self.step = 0
        self.since = clock()
        self._waited_before = waits.seconds
        self.log: list[tuple[str, float, float]] | None = None
        """(name, start, stop) of each phase. None while phases are not recorded."""
        self.stream: StreamTimes | None = None
        """None on a CPU."""
        self._current = _PhaseSeconds()
        self._by_phase = {self.name: self._current}

    def enter(self, name: str, *, interrupts: bool = False, on_stream: bool = True) -> str:
        """Enter a phase, and return the name of the previous phase. With `interrupts`, the previous
        phase continues later. `on_stream` is False if the phase applies to the host only."""
        now, before, current, waited = self._clock(), self.name, self._current, waits.seconds
        took = now - self.since
        current.total += took
        current.waited += waited - self._waited_before
        self._waited_before = waited
        if self.log is not None:
            self.log.append((before, self.since, now))
        faded = FADES * current.usual
        current.usual = took if took > faded else faded
        current.has_ended |= not interrupts
        if name not in self._by_phase:
            self._by_phase[name] = _PhaseSeconds()
        self._current = self._by_phase[name]
        self.name, self.since = name, now
        if on_stream and self.stream is not None:
            self.stream.enter(name)
        return before

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """A phase in which the host waits while its device executes queued work."""
        before = self.enter(WAITING_FOR_DEVICE, interrupts=True, on_stream=False)
        try:
            yield
        finally:
            self.enter(before, on_stream=False)

    def during(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Iterate over `items`. The wait for an item is a phase `name`, which interrupts the
        current phase."""
        iterator = iter(items)
        while True:
            before = self.enter(name, interrupts=True)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.enter(before)
            yield item

    @property
    def totals(self) -> defaultdict[str, float]:
        by_phase = list(self._by_phase.items())
        return defaultdict(float, {name: taken.total for name, taken in by_phase})

    @property
    def waited(self) -> defaultdict[str, float]:
        """Seconds of waits for other ranks, by phase."""
        by_phase = list(self._by_phase.items())
        return defaultdict(float, {name: taken.waited for name, taken in by_phase})

    def usual(self, name: str) -> float | None:
        """Return the longest recent duration of a phase in seconds. None if the phase has never
        ended."""
        taken = self._by_phase.get(name)
        return taken.usual if taken is not None and taken.has_ended else None

    @property
    def seconds(self) -> float:
        """Seconds since the start of the current phase."""
        return self._clock() - self.since
