"""What a rank is at, since when, how long such a thing took of late, and how long all of them took in all."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from lockstep.comm.waits import waits
from lockstep.watch.stream_times import StreamTimes

T = TypeVar("T")
FADES = 0.95
"""With each time that a phase ends, of what is remembered of the longest one."""


class Phases:
    """Of one rank. Entered by the thread that trains; any may look."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.name = "set-up"
        self.step = 0
        self.since = clock()
        self._waited_before = waits.seconds
        self.usual: dict[str, float] = {}
        """Seconds, of each phase that has ended: the longest of late."""
        self.log: list[tuple[str, float, float]] | None = None
        """Where phases are written down as they end: name, from, until."""
        self.stream: StreamTimes | None = None
        """Where a GPU computes."""
        self.totals: defaultdict[str, float] = defaultdict(float)
        """Seconds that each has taken this thread in all."""
        self.waited: defaultdict[str, float] = defaultdict(float)
        """Of those, the seconds of waits for others."""

    def enter(self, name: str) -> str:
        """Go on to another phase. Returns the one before it."""
        now, before = self._clock(), self.name
        took = now - self.since
        self.totals[before] += took
        waited = waits.seconds
        self.waited[before] += waited - self._waited_before
        self._waited_before = waited
        if self.log is not None:
            self.log.append((before, self.since, now))
        faded = FADES * self.usual.get(before, 0.0)
        self.usual[before] = took if took > faded else faded
        self.name, self.since = name, now
        if self.stream is not None:
            self.stream.enter(name)
        return before

    def during(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """The items, the wait for each of which is a phase of its own."""
        iterator = iter(items)
        while True:
            before = self.enter(name)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.enter(before)
            yield item

    @property
    def seconds(self) -> float:
        """In this phase."""
        return self._clock() - self.since
