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

    def keep_spare(self, environment: Mapping[str, str]) -> None:
        """Start a spare process if there is none. `environment`: that of all workers."""
        if self._spare is not None and not self._spare.is_alive():
            self._spare.end()
            self._spare = None
        if self._spare is None:
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

    def go_on_with_fewer(self, workers: WorkerProcesses) -> bool:
        """Drop the workers that have ended, and as many more as the plan has no place for. Returns False if it has none
        for so few."""
        lost = set(workers.lost)
        kept = workers.connections.largest_size([rank for rank in workers.ranks if rank not in lost])
        if kept:
            workers.drop([*lost, *[rank for rank in workers.ranks if rank not in lost][kept:]])
        return bool(kept)

    def start_to_join(self, workers: WorkerProcesses, variables: Mapping[int, Mapping[str, str]]) -> None:
        """Start workers that are to join a run that is under way. `variables`: those of each, by a rank of its own
        for the time until then."""
        for rank, each in variables.items():
            workers.add(rank, self._start, {**each, REPLACEMENT: "1"})
            workers.connections.note_replacement(rank)

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
