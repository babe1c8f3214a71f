"""Times of a GPU's stream by phase: the host only queues work, and is ahead of the stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import torch


class StreamTimes:
    """The stream that a rank computes on. Its waits for data and for other ranks count for the phases in which they happen."""

    def __init__(self, mark: Callable[[], torch.cuda.Event]) -> None:
        """`mark`: makes an event that measures time."""
        self._mark = mark
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._totals: defaultdict[str, float] = defaultdict(float)

    def enter(self, name: str) -> None:
        """The work that is handed over from now on is of this phase."""
        mark = self._mark()
        mark.record()
        self._marks.append((name, mark))

    def totals(self) -> defaultdict[str, float]:
        """Seconds of each phase in all. Waits until the GPU has reached the phase that it is in now."""
        if self._marks:
            self._marks[-1][1].synchronize()
            for (name, began), (_, ended) in pairwise(self._marks):
                self._totals[name] += began.elapsed_time(ended) / 1e3
            del self._marks[:-1]
        return self._totals
