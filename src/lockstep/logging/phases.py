"""The phases of a rank's work: the current one, since when, its usual duration, and each one's total time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from lockstep.comm.wait_times import waits
from lockstep.logging.stream_times import StreamTimes

T = TypeVar("T")
FADES = 0.95
"""With each time that a phase ends, of what is remembered of the longest one."""


@dataclass(slots=True)
class _Taken:
    """The times of one phase, in seconds."""

    total: float = 0.0
    waited: float = 0.0
    usual: float = -1.0


class Phases:
    """The phases of one rank. The training thread enters them; any thread may read."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.name = "set-up"
        self.step = 0
        self.since = clock()
        self._waited_before = waits.seconds
        self.log: list[tuple[str, float, float]] | None = None
        """A record of each phase as it ends, (name, start, stop), if it is wanted."""
        self.stream: StreamTimes | None = None
        """The times of the GPU's stream; None on a CPU."""
        self._taken = _Taken()
        self._takers = {self.name: self._taken}

    def enter(self, name: str) -> str:
        """Go on to another phase. Returns the one before it."""
        now, before, taken, waited = self._clock(), self.name, self._taken, waits.seconds
        took = now - self.since
        taken.total += took
        taken.waited += waited - self._waited_before
        self._waited_before = waited
        if self.log is not None:
            self.log.append((before, self.since, now))
        faded = FADES * taken.usual
        taken.usual = took if took > faded else faded
        if name not in self._takers:
            self._takers[name] = _Taken()
        self._taken = self._takers[name]
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
    def totals(self) -> defaultdict[str, float]:
        """Seconds that each phase has taken this thread in all."""
        return defaultdict(float, {name: taken.total for name, taken in list(self._takers.items())})

    @property
    def waited(self) -> defaultdict[str, float]:
        """Seconds of each phase that were waits for other ranks."""
        return defaultdict(float, {name: taken.waited for name, taken in list(self._takers.items())})

    def usual(self, name: str) -> float | None:
        """Seconds: the longest of late. None where that phase has not ended yet."""
        taken = self._takers.get(name)
        return None if taken is None or taken.usual < 0 else taken.usual

    @property
    def seconds(self) -> float:
        """In this phase."""
        return self._clock() - self.since
