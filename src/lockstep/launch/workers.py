"""The worker processes of one start on this machine: who runs, who has failed, and how they are ended.

[Note: the end] A worker has failed when its process ends with a status other than 0 or its record is there, whichever is seen first. What
follows takes at most LATER_PEER_SECONDS + STOP_SECONDS + KILL_SECONDS: the failures that come with it are waited for a moment (long,
where all that were seen so far are lost peers, so that the cause is not missed), the rest is stopped, and what is left then is killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from lockstep.launch import worker
from lockstep.launch.failure import Ending, Failure, Record, read_crash, read_torch_record
from lockstep.launch.termination import PREEMPTED_STATUS

POLL_SECONDS = 0.05
LATER_SECONDS = 0.3
"""How long failures that come together are waited for."""
LATER_PEER_SECONDS = 3.0
"""The same, while every failure so far is the loss of a peer."""
STOP_SECONDS = 3.0
"""From SIGTERM to SIGKILL for workers that are stopped because another failed."""
SAVE_SECONDS = 600.0
"""The same where a worker says that it saves what it has."""
KILL_SECONDS = 2.0
"""How long a killed process is waited for; one that the kernel holds (a device that hangs) is left to it."""


class Process(Protocol):
    """A worker process: `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """None while it runs; then its exit status, or minus the number of the signal that killed it."""


Start = Callable[[Mapping[str, str]], Process]
"""Starts one worker with these variables added to the environment. Called in order of local ranks."""


class Workers:
    """Those of one start. `records`: an empty folder of theirs. `hurried`: whether nobody wants to wait for them any longer."""

    def __init__(self, records: Path, hurried: Callable[[], bool]) -> None:
        self._records = records
        self._hurried = hurried
        self._processes: dict[int, Process] = {}
        self._returncodes: dict[int, int] = {}
        self._failures: dict[int, Failure] = {}
        self._asked: set[int] = set()
        self._stopped: set[int] = set()
        self._preempted: set[int] = set()
        self._is_over = False

    def add(self, rank: int, start: Start, environment: Mapping[str, str]) -> int:
        """Start the worker of this global rank. Returns its process's number."""
        self._processes[rank] = start({**environment, **self._variables(rank)})
        return self._processes[rank].pid

    def _variables(self, rank: int) -> dict[str, str]:
        return {
            "TORCHELASTIC_ERROR_FILE": str(self._file(rank, "torch")),
            worker.RECORD: str(self._file(rank, "record")),
            worker.CRASH: str(self._file(rank, "crash")),
            worker.AGENT: str(os.getpid()),
            worker.NEEDS_TIME: str(self._file(rank, "needs-time")),
            worker.AGAIN: str(self._file(rank, "again")),
            worker.IS_OVER: str(self._records / "is-over"),
            worker.PASSED_ON: str(self._records / "passed-on"),
        }

    @property
    def running(self) -> Sequence[int]:
        """The ranks that run, as far as was seen."""
        return [rank for rank in self._processes if rank not in self._returncodes]

    @property
    def ranks(self) -> Sequence[int]:
        return list(self._processes)

    def ending(self) -> Ending:
        """How they ended, as far as was seen."""
        failed = self._failures.keys()
        return Ending(
            failures=list(self._failures.values()),
            stopped=sorted(self._stopped - failed - self._preempted),
            finished=sorted(rank for rank in self._returncodes if rank not in failed | self._stopped | self._preempted),
            preempted=sorted(self._preempted),
            left=self.running,
        )

    def again(self) -> str | None:
        """Why those that failed ask to be started again, if one does."""
        return next((path.read_text(encoding="utf-8") for path in sorted(self._records.glob("rank-*.again"))), None)

    def have_failed(self) -> bool:
        """Look who has ended since the last look, and say whether one has failed."""
        self._look()
        return bool(self._failures)

    def end_after_loss(self) -> None:
        """End those that are left once one has failed, or another machine is lost. They may save what they have."""
        self._is_over = True
        (self._records / "is-over").touch()
        self._wait_for_later_failures()
        self.stop(signal.SIGTERM, STOP_SECONDS)

    def ask(self, number: signal.Signals, grace_seconds: float) -> None:
        """Have them save and end by themselves, all together; end those that do not in time."""
        (self._records / "passed-on").touch()
        for rank in self.running:
            self._asked.add(rank)
            _signal_group(self._processes[rank].pid, number)
        self._wait(grace_seconds, until=lambda: bool(self._failures) or self._hurried())
        if self._failures:
            self.end_after_loss()
        else:
            self.stop(signal.SIGTERM, 0.0)

    def stop(self, number: signal.Signals, grace_seconds: float) -> None:
        """End every worker: `number` to those that run, have not failed and were not asked, SIGKILL to the groups of all that are left."""
        self._look()
        (self._records / "passed-on").touch()
        for rank in self.running:
            if rank not in self._failures:
                self._stopped.add(rank)
                if rank not in self._asked:
                    _signal_group(self._processes[rank].pid, number)
        self._wait(grace_seconds, until=self._hurried)
        for rank in self.running:
            _signal_group(self._processes[rank].pid, signal.SIGKILL)
        self._wait(KILL_SECONDS, until=lambda: False)

    def _look(self) -> None:
        """Note who has ended and who has failed since the last look."""
        for rank, process in self._processes.items():
            if rank not in self._returncodes:
                returncode = process.poll()
                if returncode is not None:
                    self._returncodes[rank] = returncode
                    if returncode != 0 or rank in self._stopped:
                        _kill_what_is_left(process.pid)
                    if returncode == PREEMPTED_STATUS and not self._file(rank, "record").exists():
                        self._preempted.add(rank)
                    if returncode == -signal.SIGTERM and rank in self._asked:
                        self._stopped.add(rank)
                    if returncode == 128 + signal.SIGTERM and self._is_over:  # it waited for one that is gone, and ended itself
                        self._stopped.add(rank)
            if rank not in self._failures and rank not in self._stopped | self._preempted:
                self._judge(rank)

    def _judge(self, rank: int) -> None:
        returncode = self._returncodes.get(rank)
        record = Record.read(self._file(rank, "record"))
        if record is None and not returncode:
            return
        if record is None and returncode is not None:
            record = read_torch_record(self._file(rank, "torch"), returncode) if returncode > 0 else None
        self._failures[rank] = Failure(
            rank=rank,
            time=record.time if record is not None else time.time(),
            returncode=returncode if returncode is not None else 1,
            record=record,
            crash=read_crash(self._file(rank, "crash")),
        )

    def _wait_for_later_failures(self) -> None:
        began = time.monotonic()
        while self.running:
            only_peers = all(failure.lost_a_peer for failure in self._failures.values())
            if time.monotonic() - began > (LATER_PEER_SECONDS if only_peers else LATER_SECONDS):
                return
            time.sleep(POLL_SECONDS)
            self._look()

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        began = time.monotonic()
        while self.running and not until():
            needs_time = any(self._file(rank, "needs-time").exists() for rank in self.running)
            if time.monotonic() - began > (max(seconds, SAVE_SECONDS) if needs_time else seconds):
                return
            time.sleep(POLL_SECONDS)
            self._look()

    def _file(self, rank: int, kind: str) -> Path:
        return self._records / f"rank-{rank}.{kind}"


def _signal_group(leader: int, number: signal.Signals) -> None:
    """To a worker that runs and what it started; to the worker alone where it does not lead a group yet."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        os.kill(leader, number)


def _kill_what_is_left(leader: int) -> None:
    """End what a worker started and left behind. Only right after its end was noticed: later its number may be another's."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
