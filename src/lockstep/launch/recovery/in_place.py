"""Recovery in place, in the launcher: the spare process, and the wait until all workers are ready to go on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from lockstep.launch.recovery.rejoin import REPLACEMENT
from lockstep.launch.recovery.spare import Spare
from lockstep.launch.worker_processes import HOLD_POLL_SECONDS, Start, WorkerProcesses

SAME_STEP = 3
"""Losses of the same rank at the same step after which the run ends: a further recovery would not mend it."""


class InPlace:
    """The recoveries of one run on this machine."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._spare: Spare | None = None
        self._losses: Counter[tuple[int, int]] = Counter()
        self.lost_at = 0.0
        """When the latest recovery began, in seconds since 1970."""

    def keep_spare(self, workers: WorkerProcesses, environment: Mapping[str, str]) -> None:
        """Start a spare process, once all workers train, if there is none. `environment`: that of all workers."""
        if self._spare is not None and not self._spare.is_alive():
            self._spare.end()
            self._spare = None
        if self._spare is None and workers.connections.why_not(workers.ranks) is None:
            self._spare = Spare(self._start, environment)

    def note_losses(self, ranks: Sequence[int], step: int) -> bool:
        """Note that workers that trained were lost after this step, -1 if it is not known. Returns True if one was lost
        there too often."""
        if step < 0:
            return False
        losses = [(rank, step) for rank in ranks]
        self._losses.update(losses)
        return any(self._losses[loss] >= SAME_STEP for loss in losses)

    def replace(self, workers: WorkerProcesses, variables: Callable[[int], Mapping[str, str]]) -> None:
        """Start a process in the place of each worker that has ended. `variables`: those of a rank."""
        for rank in workers.lost:
            spare, self._spare = self._spare, None
            if spare is not None and not spare.is_alive():
                spare.end()
                spare = None
            workers.replace(rank, self._start, {**variables(rank), REPLACEMENT: "1"}, spare)

    def all_are_ready(self, workers: WorkerProcesses) -> bool:
        """Wait until all workers wait for their new ranks. Returns False if one ends or cannot go on."""
        while True:
            if workers.have_failed():
                return False
            waiting = workers.connections.waiting()
            if len(waiting) == len(workers.ranks):
                return True
            time.sleep(HOLD_POLL_SECONDS)

    def close(self) -> None:
        if self._spare is not None:
            self._spare.end()
            self._spare = None
