"""Recovery in place, in the launcher. The launcher keeps a spare process, replaces lost workers,
and waits until all workers are ready to continue."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from lockstep.base.errors import HangError, say
from lockstep.launch.failures import failure_record
from lockstep.launch.termination import HUNG_STATUS
from lockstep.launch.worker_processes import HOLD_POLL_SECONDS, Spare, Start, WorkerProcesses

QUICK_SECONDS = 1.0
"""Workers wait for a spare process after a loss if it can reach its training within this time."""
START_SECONDS = 60.0
"""Shortest time that a new process gets to reach its training before it is killed."""
SAME_STEP = 3
"""Number of losses of the same rank at the same step after which the run ends."""


class InPlace:
    def __init__(self, start: Start, *, shrinks: bool, spare_imports: Sequence[str]) -> None:
        self._start = start
        self._spare_imports = spare_imports
        self._shrinks = shrinks
        self._newcomers: WorkerProcesses | None = None
        self._spare: Spare | None = None
        self._losses: Counter[tuple[int, int]] = Counter()
        # the longest time of any worker from the start of its script to its training
        self._script_seconds = 0.0
        self.lost_at = 0.0

    def keep_spare(self, environment: Mapping[str, str]) -> None:
        if self._spare is not None and not self._spare.is_alive():
            self._spare.end()
            self._spare = None
        if self._spare is None and not self._shrinks:
            self._spare = Spare(self._start, environment, self._spare_imports)

    def note_losses(self, ranks: Sequence[int], step: int) -> bool:
        if step < 0:
            return False
        losses = [(rank, step) for rank in ranks]
        self._losses.update(losses)
        return any(self._losses[loss] >= SAME_STEP for loss in losses)

    def fill_places(
        self,
        workers: WorkerProcesses,
        variables: Callable[[int], Mapping[str, str]],
        newcomers: Callable[[int], tuple[WorkerProcesses, Mapping[int, Mapping[str, str]]]],
    ) -> None:
        """Replace each worker that has ended by a new process. If a new process would take long,
        and the plan fits fewer workers, continue with fewer workers."""
        took = [each.script_seconds for each in workers.connections.by_rank.values()]
        self._script_seconds = max(self._script_seconds, *took, 0.0)
        if self._newcomers is not None and self.newcomers_are_ready():
            workers.adopt(self._newcomers)
            self._newcomers = None
        if self._shrinks:
            if self._go_on_with_fewer(workers):
                return
        elif self._newcomers is None:
            spare = self._spare
            imports = spare.import_seconds() if spare is not None and spare.is_alive() else None
            quick = is_quick(
                len(workers.lost), script_seconds=self._script_seconds, import_seconds=imports
            )
            if not quick and (fewer := self._go_on_with_fewer(workers)):
                self._newcomers, theirs = newcomers(fewer)
                self.put(self._newcomers, theirs)
                return
        self.put(workers, {rank: variables(rank) for rank in workers.lost})

    def newcomers_are_ready(self) -> bool:
        """True if all newcomers (processes that join the run later) wait to join. If a newcomer has
        failed, all newcomers are dropped."""
        if self._newcomers is None:
            return False
        if self._newcomers.have_failed() or self._newcomers.lost:
            first = self._newcomers.ending().first
            line = "a new process ended before its training" if first is None else first.line
            say(
                f"lockstep: {line}; it was to take the place of a lost one, and the run goes on"
                " without it"
            )
            self.drop_newcomers()
            return False
        return len(self._newcomers.connections.waiting()) == len(self._newcomers.ranks)

    def drop_newcomers(self) -> None:
        if self._newcomers is not None:
            self._newcomers.drop(self._newcomers.ranks)
            self._newcomers = None

    def _take_spare(self) -> Spare | None:
        spare, self._spare = self._spare, None
        if spare is not None and not spare.is_alive():
            spare.end()
            return None
        return spare

    def _go_on_with_fewer(self, workers: WorkerProcesses) -> int:
        """Drop the workers that have ended, and then running workers until the plan fits the rest.
        Returns the number of dropped workers. 0 if the plan fits no smaller number."""
        lost = set(workers.lost)
        survivors = [rank for rank in workers.ranks if rank not in lost]
        kept = workers.connections.largest_size(survivors) if lost else 0
        if not kept:
            return 0
        dropped = [*lost, *survivors[kept:]]
        workers.drop(dropped)
        return len(dropped)

    def put(self, workers: WorkerProcesses, variables: Mapping[int, Mapping[str, str]]) -> None:
        for rank, each in variables.items():
            workers.replace(rank, self._start, each, self._take_spare())

    def all_are_ready(self, workers: WorkerProcesses) -> bool:
        """Wait until all workers wait for their new ranks. Returns False if a worker ends, or if a
        worker takes far longer than usual to reach its training. A worker that takes far longer
        than usual is killed."""
        limit = max(START_SECONDS, 10 * self._script_seconds) if self._script_seconds else math.inf
        until = time.monotonic() + limit
        while True:
            if workers.have_failed() or workers.lost:
                return False
            if time.monotonic() > until:
                error = HangError("the script does not come to its training, as it did before")
                workers.kill(
                    workers.connections.starting(), asdict(failure_record(error, None, HUNG_STATUS))
                )
            waiting = workers.connections.waiting()
            if len(waiting) == len(workers.ranks):
                return True
            time.sleep(HOLD_POLL_SECONDS)

    def close(self) -> None:
        self.drop_newcomers()
        if self._spare is not None:
            self._spare.end()
            self._spare = None


def is_quick(lost: int, *, script_seconds: float, import_seconds: float | None) -> bool:
    if lost != 1:
        return lost == 0
    return import_seconds is not None and script_seconds - import_seconds < QUICK_SECONDS
