"""The worker processes of one start on this machine: their state, and their end. [Note: the end] A
worker has failed when its process ends with a status other than 0 or its failure record exists. The
launcher then waits a moment for simultaneous failures; longer while all failures are lost peers, so
that it does not miss the cause. Then it stops the other workers, and kills the remaining ones. All
this takes at most PEER_FAILURES_SECONDS + STOP_SECONDS + KILL_SECONDS.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from lockstep.base.processes import kill_all, with_marker
from lockstep.launch.failures import (
    Ending,
    FailureRecord,
    WorkerFailure,
    read_crash,
    read_torch_record,
)
from lockstep.launch.recovery.channel import open_channel
from lockstep.launch.recovery.connections import Connections
from lockstep.launch.termination import PREEMPTED_STATUS, SAVE_SECONDS
from lockstep.launch.worker_files import STARTED_BY, WorkerFiles, WorkerStart

POLL_SECONDS = 0.05
FAILURES_SECONDS = 0.3
"""Seconds that the launcher waits after a failure for simultaneous ones."""
PEER_FAILURES_SECONDS = 3.0
"""The same, while all failures are losses of a peer."""
STOP_SECONDS = 3.0
"""Seconds from SIGTERM to SIGKILL for workers that are stopped because another failed."""
HOLD_SECONDS = 300.0
"""Seconds that a worker has, after another one is lost, to leave its step. It may be computing, or
compiling."""
HOLD_POLL_SECONDS = 0.002
LEAVE_SECONDS = 1.0
"""Seconds after a successful end of all workers in which processes that they started may end."""
KILL_SECONDS = 2.0
"""Seconds that the launcher waits for a killed process; it leaves one that the kernel holds."""


class WorkerProcess(Protocol):
    """A worker process: `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """None while it runs; then its exit status, or minus the number of the signal that killed
        it."""


class Signals(Protocol):
    """The signals that the launcher has received."""

    def is_asked(self) -> bool:
        """True once a signal asks to end."""

    def is_impatient(self) -> bool:
        """True once a second one asks to end at once."""


Start = Callable[[Mapping[str, str]], WorkerProcess]
"""Starts one worker with these variables added to the environment. Called in order of local
ranks."""


class Spare:
    """A spare process, seen from the launcher: it has imported torch and lockstep, and waits to
    replace a lost worker."""

    def __init__(
        self, start: Start, environment: Mapping[str, str], imports: Sequence[str]
    ) -> None:
        """`environment`: the variables of all workers, without those of a rank. `imports`: the
        modules that it imports."""
        ends = open_channel()
        assert ends is not None, "recovery in place is for Linux"
        self.channel, theirs = ends
        self._import_seconds: float | None = None
        with theirs:
            told = WorkerStart(launcher=os.getpid(), channel=theirs.fileno(), imports=imports)
            self.process: WorkerProcess = start({**environment, **told.variables()})

    def import_seconds(self) -> float | None:
        """Seconds of the imports, which a worker's script needs and a spare's does not. None before
        they are done."""
        if self._import_seconds is None and (message := self.channel.receive(0.0)) is not None:
            self._import_seconds = message["import_seconds"]
        return self._import_seconds

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def become(self, environment: Mapping[str, str]) -> None:
        """Have it run the script as the worker with these variables."""
        self.channel.send("start", environment=dict(environment))

    def end(self) -> None:
        """End it: it reads that the launcher has closed the connection."""
        self.channel.close()


class WorkerProcesses:
    """The workers of one start."""

    def __init__(
        self, folder: Path, signals: Signals, *, not_in_place: str | None = "", name: str = "rank"
    ) -> None:
        """`folder`: for the workers' files, whose names begin with `name`. `not_in_place`: why
        workers cannot recover in place; empty if not requested; None: they may."""
        self.connections = Connections(not_in_place)
        self.folder = folder
        self._name = name
        self._signals = signals
        self._processes: dict[int, WorkerProcess] = {}
        self._stems: dict[int, Path] = {}
        self._returncodes: dict[int, int] = {}
        self._failures: dict[int, WorkerFailure] = {}
        self._asked: set[int] = set()
        self._stopped: set[int] = set()
        self._preempted: set[int] = set()
        self._shutdown = False

    def add(self, rank: int, start: Start, environment: Mapping[str, str], **told: bool) -> int:
        """Start the worker of this global rank. Returns its process id. `told`: see
        `WorkerStart`."""
        with self.connections.opened(rank) as channel:
            own = self._own_variables(rank, channel=channel, **told)
            self._processes[rank] = start({**environment, **own})
        return self._processes[rank].pid

    def replace(
        self, rank: int, start: Start, environment: Mapping[str, str], spare: Spare | None
    ) -> None:
        """Replace the ended worker of this rank by a new process, or by the spare one."""
        self._shutdown = False
        self._files(rank).shutdown.unlink(missing_ok=True)
        self._files(rank).remove_own()
        for noted in (self._returncodes, self._failures):
            noted.pop(rank, None)
        for ranks in (self._asked, self._stopped, self._preempted):
            ranks.discard(rank)
        if spare is None:
            self.add(rank, start, environment, is_replacement=True)
        else:
            self._processes[rank] = spare.process
            self.connections.use(rank, spare.channel)
            spare.become({**environment, **self._own_variables(rank, is_replacement=True)})
        self.connections.note_replacement(rank)

    def adopt(self, others: WorkerProcesses) -> None:
        """Take over the workers of `others`, which have other ranks."""
        for rank, process in others._processes.items():
            self._processes[rank], self._stems[rank] = process, others._files(rank).stem
        self.connections.by_rank |= others.connections.by_rank

    def kill_hanging(self) -> list[tuple[Sequence[int], Mapping[str, Any]]]:
        """Kill workers that a watchdog reports as hanging. Returns those of other machines, with
        their records."""
        self.connections.look()
        elsewhere: list[tuple[Sequence[int], Mapping[str, Any]]] = []
        while self.connections.hanging:
            ranks, record = self.connections.hanging.pop()
            self.kill(ranks, record)
            if others := [rank for rank in ranks if rank not in self._processes]:
                elsewhere.append((others, record))
        return elsewhere

    def kill(self, ranks: Collection[int], record: Mapping[str, Any]) -> None:
        """Kill the running workers of these ranks, with a record of the reason."""
        for rank in set(ranks) & set(self.healthy):
            FailureRecord(**record).write(self._files(rank).failure)
            _signal_group(self._processes[rank].pid, signal.SIGKILL)

    def drop(self, ranks: Collection[int]) -> None:
        """Kill these workers if they run, and forget them."""
        for rank in ranks:
            if rank not in self._returncodes:
                _signal_group(self._processes[rank].pid, signal.SIGKILL)
        self._wait(KILL_SECONDS, until=lambda: not set(ranks) - self._returncodes.keys())
        for noted in (self._processes, self._returncodes, self._failures, self._stems):
            for rank in ranks:
                noted.pop(rank, None)
        self.connections.drop(ranks)

    def renumber(self, ranks: Sequence[int]) -> None:
        """Give the workers these ranks, in order."""
        new = dict(zip(sorted(self._processes), ranks, strict=True))
        self._processes = {new[rank]: process for rank, process in self._processes.items()}
        self._stems = {new[rank]: self._files(rank).stem for rank in new}
        self._returncodes = {new[rank]: code for rank, code in self._returncodes.items()}
        self._failures = {
            new[rank]: replace(failure, rank=new[rank]) for rank, failure in self._failures.items()
        }
        self._asked = {new[rank] for rank in self._asked}
        self._stopped = {new[rank] for rank in self._stopped}
        self._preempted = {new[rank] for rank in self._preempted}
        self.connections.renumber(new)

    def _own_variables(self, rank: int, **told: Any) -> dict[str, str]:
        files = self._files(rank)
        start = WorkerStart(launcher=os.getpid(), files=str(files.stem), **told)
        torch_error = {"TORCHELASTIC_ERROR_FILE": str(files.torch_error)}
        return {**start.variables(), STARTED_BY: str(files.stem), **torch_error}

    @property
    def running(self) -> Sequence[int]:
        """The ranks that were running when last looked at."""
        return [rank for rank in self._processes if rank not in self._returncodes]

    @property
    def healthy(self) -> Sequence[int]:
        """The running ranks that have not failed."""
        return [rank for rank in self.running if rank not in self._failures]

    @property
    def ranks(self) -> Sequence[int]:
        return list(self._processes)

    def ending(self) -> Ending:
        """The known end of the workers."""
        failed = self._failures.keys()
        return Ending(
            failures=list(self._failures.values()),
            stopped=sorted(self._stopped - failed - self._preempted),
            finished=sorted(
                rank
                for rank in self._returncodes
                if rank not in failed | self._stopped | self._preempted
            ),
            preempted=sorted(self._preempted),
            unkillable=self.running,
            has_saved=any(self._files(rank).saved.exists() for rank in self._processes),
            options_read=bool(self._processes) and self._files(0).options_read.exists(),
        )

    def restart_request(self) -> str | None:
        """Why a failed worker asks for a restart; None if none does."""
        requests = (self._files(rank).restart_request for rank in sorted(self._processes))
        return next((path.read_text(encoding="utf-8") for path in requests if path.exists()), None)

    def has_user_error(self) -> bool:
        """True if a worker has failed by a mistake of the user."""
        return any(
            failure.record is not None and failure.record.user_error
            for failure in self._failures.values()
        )

    def have_failed(self) -> bool:
        """Note which workers have ended. True if one has failed."""
        self._look()
        return bool(self._failures)

    def hold(self) -> str | None:
        """Have the running workers leave their collectives and wait for new ranks. Kills workers
        that do not in time. Returns None, or why it is not possible."""
        began = time.monotonic()
        self.connections.send(self.connections.must_leave(self.running), "lost")
        while missing := {
            *self.connections.must_leave(self.running),
            *[rank for rank in self.running if rank in self._failures],
        }:
            if self._signals.is_asked():
                return "the run was asked to end"
            if refusal := self.connections.refusal():
                return refusal
            waited = time.monotonic() - began
            # A failed worker says so before its record exists.
            if waited > FAILURES_SECONDS and (why_not := self.connections.why_not(self.healthy)):
                return why_not
            for rank in missing:
                if waited > (FAILURES_SECONDS if rank in self._failures else HOLD_SECONDS):
                    _signal_group(self._processes[rank].pid, signal.SIGKILL)
            time.sleep(HOLD_POLL_SECONDS)
            self._look()
        return "a process had finished" if 0 in self._returncodes.values() else None

    @property
    def lost_in_training(self) -> Sequence[int]:
        """The workers whose training had begun."""
        return [
            rank for rank in self._returncodes if not self.connections.by_rank[rank].is_starting
        ]

    @property
    def lost(self) -> Sequence[int]:
        """The ranks whose processes have ended."""
        return list(self._returncodes)

    def end_after_loss(self) -> None:
        """End the remaining workers once one has failed, or another machine is lost. They may save
        first."""
        self._shutdown = True
        self.connections.release()
        self._files(0).shutdown.touch()
        self._wait_for_later_failures()
        self.stop(signal.SIGTERM, STOP_SECONDS)

    def ask(self, number: signal.Signals, grace_seconds: float) -> None:
        """Have all workers save and end. Ends the ones that do not in time."""
        self._files(0).signal_forwarded.touch()
        for rank in self.running:
            self._asked.add(rank)
            _signal_group(self._processes[rank].pid, number)
        self._wait(
            grace_seconds, until=lambda: bool(self._failures) or self._signals.is_impatient()
        )
        if self._failures:
            self.end_after_loss()
        else:
            self.stop(signal.SIGTERM, 0.0)

    def stop(self, number: signal.Signals, grace_seconds: float) -> None:
        """End every worker: signal `number` to running ones that neither failed nor were asked to
        end, SIGKILL to the rest."""
        self._look()
        self.connections.release()
        self._files(0).signal_forwarded.touch()
        for rank in self.running:
            if rank not in self._failures:
                self._stopped.add(rank)
                if rank not in self._asked:
                    _signal_group(self._processes[rank].pid, number)
        self._wait(grace_seconds, until=self._signals.is_impatient)
        for rank in self.running:
            _signal_group(self._processes[rank].pid, signal.SIGKILL)
        self._wait(KILL_SECONDS, until=lambda: False)

    def _look(self) -> None:
        """Note which workers have ended and which have failed since the last look."""
        for rank, process in self._processes.items():
            if rank not in self._returncodes and (returncode := process.poll()) is not None:
                self._returncodes[rank] = returncode
                self._classify(rank, process.pid, returncode)
            if rank not in self._failures and rank not in self._stopped | self._preempted:
                self._judge(rank)

    def _classify(self, rank: int, pid: int, returncode: int) -> None:
        """Note whether a worker that has just ended was preempted or stopped."""
        if returncode != 0 or rank in self._stopped:
            _kill_group(pid)
            self._kill_started_by([rank])
        if returncode == PREEMPTED_STATUS and not self._files(rank).failure.exists():
            self._preempted.add(rank)
        if returncode == -signal.SIGTERM and rank in self._asked:
            self._stopped.add(rank)
        # it waited for a lost peer, and ended itself
        if returncode == 128 + signal.SIGTERM and self._shutdown:
            self._stopped.add(rank)

    def kill_what_is_left(self) -> Sequence[str]:
        """Kill processes that ended workers left running. Called once all workers have ended.
        Returns them in words."""
        until = time.monotonic() + LEAVE_SECONDS
        while with_marker(*self._markers(self._returncodes)) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return [
            f"{name} (process {pid})"
            for pid, name in self._kill_started_by(self._returncodes).items()
        ]

    def _kill_started_by(self, ranks: Collection[int]) -> dict[int, str]:
        return kill_all(lambda: with_marker(*self._markers(ranks)), KILL_SECONDS)

    def _markers(self, ranks: Collection[int]) -> Sequence[str]:
        return [f"{STARTED_BY}={self._files(rank).stem}" for rank in ranks]

    def _judge(self, rank: int) -> None:
        files, returncode = self._files(rank), self._returncodes.get(rank)
        record = FailureRecord.read(files.failure)
        if record is None and not returncode:
            return
        if record is None and returncode is not None:
            record = read_torch_record(files.torch_error, returncode) if returncode > 0 else None
        self._failures[rank] = WorkerFailure(
            rank=rank,
            time=record.time if record is not None else time.time(),
            returncode=returncode if returncode is not None else 1,
            record=record,
            crash=read_crash(files.crash),
        )

    def _wait_for_later_failures(self) -> None:
        began = time.monotonic()
        while self.running:
            only_peers = all(failure.lost_a_peer for failure in self._failures.values())
            if time.monotonic() - began > (
                PEER_FAILURES_SECONDS if only_peers else FAILURES_SECONDS
            ):
                return
            time.sleep(POLL_SECONDS)
            self._look()

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        began = time.monotonic()
        while self.running and not until():
            is_saving = any(self._files(rank).saving.exists() for rank in self.running)
            if time.monotonic() - began > (max(seconds, SAVE_SECONDS) if is_saving else seconds):
                return
            time.sleep(POLL_SECONDS)
            self._look()

    def _files(self, rank: int) -> WorkerFiles:
        return WorkerFiles(self._stems.get(rank, self.folder / f"{self._name}-{rank}"))


def _signal_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a worker's process group, or to the worker alone if it does not lead a group
    yet."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        os.kill(leader, number)


def _kill_group(leader: int) -> None:
    """Kill the process group of an ended worker. Called at once, because its id may later be
    another process's."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
