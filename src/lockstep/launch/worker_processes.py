"""The worker processes (one for each rank) of one start on this machine: their state, and how they
end.

[Note: the end] A worker has failed when its process ends with a status other than 0 or its failure
record exists. After a failure, the launcher waits a moment for simultaneous failures. The launcher
waits longer while all failures are errors about lost peers, to find the failure that caused these
errors. The launcher then stops the running workers, and kills workers that do not stop in time. The
wait and the stop take at most PEER_FAILURES_SECONDS + STOP_SECONDS + KILL_SECONDS.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.base.processes import kill_all, with_marker
from lockstep.base.system import signals, signals_handled
from lockstep.launch.failures import (
    Ending,
    FailureRecord,
    WorkerFailure,
    read_crash,
    read_torch_record,
)
from lockstep.launch.recovery.channel import open_channel
from lockstep.launch.recovery.connections import Connections
from lockstep.launch.termination import (
    END_SECONDS,
    ENDING,
    PREEMPTED_STATUS,
    PREEMPTING,
    SAVE_SECONDS,
)
from lockstep.launch.worker_files import STARTED_BY, WorkerFiles, WorkerStart

POLL_SECONDS = 0.05
FAILURES_SECONDS = 0.3
PEER_FAILURES_SECONDS = 3.0
STOP_SECONDS = 3.0
HOLD_SECONDS = 300.0
"""Time that a worker gets to leave its step after another worker is lost. A worker may be compiling
its model."""
HOLD_POLL_SECONDS = 0.002
LEAVE_SECONDS = 1.0
"""Time that the child processes of workers get to end after all workers have ended successfully."""
KILL_SECONDS = 2.0


class WorkerProcess(Protocol):
    """The interface of a worker process, which `subprocess.Popen` implements."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...


GRACE_SECONDS = dict.fromkeys(signals("SIGQUIT"), 5.0) | dict.fromkeys(
    (*PREEMPTING, *ENDING), END_SECONDS
)
"""For each signal, the seconds from forwarding the signal to the workers until the launcher kills
them. The launcher does not wait after a second signal."""


class SignalForwarding:
    """Forwards the launcher's signals to the workers. The first signal ends the run, by a
    `SignalException` in the launcher's main thread. While workers are being ended, the exception is
    delayed."""

    def __init__(self, on_interrupt: Callable[[], None]) -> None:
        self._on_interrupt = on_interrupt
        self.received: signal.Signals | None = None
        self.is_impatient = False
        self.is_ending = False
        """True while the workers are being ended after the failure of a worker. A signal that
        arrives meanwhile does not change the run's failure."""
        self._is_deferred = False

    def go_on(self) -> None:
        self.is_ending = False
        self._raise_received()

    def handling(self) -> AbstractContextManager[None]:
        return signals_handled(GRACE_SECONDS, self._on_signal)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        self._raise_received()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self.is_impatient = True
            return
        self.received = signal.Signals(number)
        if number == signal.SIGINT:
            self._on_interrupt()
        if not (self._is_deferred or self.is_ending):
            self._raise_received()

    def _raise_received(self) -> None:
        if self.received is not None:
            raise SignalException(self.received.name, self.received)


Start = Callable[[Mapping[str, str]], WorkerProcess]


class Spare:
    """A spare process, as the launcher sees it. A spare process has imported torch and lockstep,
    and waits to replace a lost worker."""

    def __init__(
        self, start: Start, environment: Mapping[str, str], imports: Sequence[str]
    ) -> None:
        ends = open_channel()
        assert ends is not None, "recovery in place is for Linux"
        self.channel, theirs = ends
        self._import_seconds: float | None = None
        with theirs:
            told = WorkerStart(launcher=os.getpid(), channel=theirs.fileno(), imports=imports)
            self.process: WorkerProcess = start({**environment, **told.variables()})

    def import_seconds(self) -> float | None:
        if self._import_seconds is None and (message := self.channel.receive(0.0)) is not None:
            self._import_seconds = message["import_seconds"]
        return self._import_seconds

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def become(self, environment: Mapping[str, str]) -> None:
        self.channel.send("start", environment=dict(environment))

    def end(self) -> None:
        self.channel.close()


@dataclass(slots=True)
class LaunchedWorker:
    files: WorkerFiles
    process: WorkerProcess
    returncode: int | None = None
    failure: WorkerFailure | None = None
    is_asked: bool = False
    is_stopped: bool = False
    """True if the launcher ended the worker, or if the worker ended because another worker had
    failed."""
    is_preempted: bool = False

    @property
    def is_running(self) -> bool:
        return self.returncode is None

    def signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            os.kill(self.process.pid, number)


class WorkerProcesses:
    def __init__(
        self,
        folder: Path,
        signals: SignalForwarding,
        *,
        not_in_place: str | None = "",
        name: str = "rank",
    ) -> None:
        """The names of the workers' files in `folder` begin with `name`. `not_in_place` is the
        reason why workers cannot recover in place, or None if they can. `not_in_place` is empty if
        recovery in place was not requested."""
        self.connections = Connections(not_in_place)
        self.folder = folder
        self._name = name
        self._signals = signals
        self._workers: dict[int, LaunchedWorker] = {}
        self._is_shutting_down = False

    def add(self, rank: int, start: Start, environment: Mapping[str, str], **told: bool) -> int:
        """Start a worker, and return its process id. `rank` is the global rank. `told` has
        additional fields of `WorkerStart`."""
        files = self._files_of(rank)
        with self.connections.opened(rank) as channel:
            process = start({**environment, **_variables(files, channel=channel, **told)})
        self._workers[rank] = LaunchedWorker(files, process)
        return process.pid

    def replace(
        self, rank: int, start: Start, environment: Mapping[str, str], spare: Spare | None
    ) -> None:
        self._is_shutting_down = False
        files = self._files_of(rank)
        files.shutdown.unlink(missing_ok=True)
        files.remove_own()
        if spare is None:
            self.add(rank, start, environment, is_replacement=True)
        else:
            self._workers[rank] = LaunchedWorker(files, spare.process)
            self.connections.use(rank, spare.channel)
            spare.become({**environment, **_variables(files, is_replacement=True)})
        self.connections.note_replacement(rank)

    def adopt(self, others: WorkerProcesses) -> None:
        self._workers |= others._workers
        self.connections.by_rank |= others.connections.by_rank

    def kill_hanging(self) -> list[tuple[Sequence[int], Mapping[str, Any]]]:
        """Kill the workers that a watchdog has reported. Returns the reported ranks of other
        machines, with the records of the hangs."""
        self.connections.look()
        elsewhere: list[tuple[Sequence[int], Mapping[str, Any]]] = []
        while self.connections.hanging:
            ranks, record = self.connections.hanging.pop()
            self.kill(ranks, record)
            if others := [rank for rank in ranks if rank not in self._workers]:
                elsewhere.append((others, record))
        return elsewhere

    def kill(self, ranks: Collection[int], record: Mapping[str, Any]) -> None:
        for rank in set(ranks) & set(self.healthy):
            FailureRecord(**record).write(self._workers[rank].files.failure)
            self._workers[rank].signal(signal.SIGKILL)

    def drop(self, ranks: Collection[int]) -> None:
        dropped = [self._workers[rank] for rank in ranks]
        for worker in dropped:
            if worker.is_running:
                worker.signal(signal.SIGKILL)
        self._wait(KILL_SECONDS, until=lambda: not any(each.is_running for each in dropped))
        for rank in ranks:
            del self._workers[rank]
        self.connections.drop(ranks)

    def renumber(self, ranks: Sequence[int]) -> None:
        new = dict(zip(sorted(self._workers), ranks, strict=True))
        self._workers = {new[rank]: worker for rank, worker in self._workers.items()}
        for rank, worker in self._workers.items():
            if worker.failure is not None:
                worker.failure = replace(worker.failure, rank=rank)
        self.connections.renumber(new)

    @property
    def ranks(self) -> Sequence[int]:
        return list(self._workers)

    @property
    def running(self) -> Sequence[int]:
        return [rank for rank, worker in self._workers.items() if worker.is_running]

    @property
    def healthy(self) -> Sequence[int]:
        return [rank for rank in self.running if self._workers[rank].failure is None]

    @property
    def lost(self) -> Sequence[int]:
        return [rank for rank, worker in self._workers.items() if not worker.is_running]

    @property
    def lost_in_training(self) -> Sequence[int]:
        return [rank for rank in self.lost if not self.connections.by_rank[rank].is_starting]

    @property
    def _failures(self) -> list[WorkerFailure]:
        return [each.failure for each in self._workers.values() if each.failure is not None]

    def ending(self) -> Ending:
        ended = {rank: each for rank, each in sorted(self._workers.items()) if not each.failure}
        return Ending(
            failures=self._failures,
            stopped=[
                rank for rank, each in ended.items() if each.is_stopped and not each.is_preempted
            ],
            finished=[
                rank
                for rank, each in ended.items()
                if not (each.is_running or each.is_stopped or each.is_preempted)
            ],
            preempted=[rank for rank, each in sorted(self._workers.items()) if each.is_preempted],
            unkillable=self.running,
            has_saved=any(each.files.saved.exists() for each in self._workers.values()),
            options_read=bool(self._workers) and self._files_of(0).options_read.exists(),
        )

    def restart_request(self) -> str | None:
        requests = (worker.files.restart_request for _, worker in sorted(self._workers.items()))
        return next((path.read_text(encoding="utf-8") for path in requests if path.exists()), None)

    def has_user_error(self) -> bool:
        return any(each.record is not None and each.record.user_error for each in self._failures)

    def have_failed(self) -> bool:
        self._look()
        return bool(self._failures)

    def hold(self) -> str | None:
        """Make the running workers leave their collectives and wait for new ranks. Kills workers
        that do not leave in time. Returns None, or the reason why the workers cannot recover."""
        began = time.monotonic()
        self.connections.send(self.connections.must_leave(self.running), "lost")
        while missing := set(self.connections.must_leave(self.running)).union(
            set(self.running) - set(self.healthy)
        ):
            if self._signals.received is not None:
                return "the run was asked to end"
            if refusal := self.connections.refusal():
                return refusal
            waited = time.monotonic() - began
            # A failing worker says that it cannot recover before the record of its failure exists.
            if waited > FAILURES_SECONDS and (why_not := self.connections.why_not(self.healthy)):
                return why_not
            for worker in (self._workers[rank] for rank in missing):
                if waited > (HOLD_SECONDS if worker.failure is None else FAILURES_SECONDS):
                    worker.signal(signal.SIGKILL)
            time.sleep(HOLD_POLL_SECONDS)
            self._look()
        has_finished = any(worker.returncode == 0 for worker in self._workers.values())
        return "a process had finished" if has_finished else None

    def end_after_loss(self) -> None:
        self._is_shutting_down = True
        self.connections.release()
        self._files_of(0).shutdown.touch()
        waited = 0.0  # not by the clock, which goes on while the machine stalls
        while self.running:
            only_peers = all(failure.lost_a_peer for failure in self._failures)
            limit = PEER_FAILURES_SECONDS if only_peers else FAILURES_SECONDS
            if waited > limit:
                break
            time.sleep(POLL_SECONDS)
            waited += POLL_SECONDS
            self._look()
        self.stop(signal.SIGTERM, STOP_SECONDS)

    def ask(self, number: signal.Signals, grace_seconds: float) -> None:
        self._files_of(0).signal_forwarded.touch()
        for rank in self.running:
            self._workers[rank].is_asked = True
            self._workers[rank].signal(number)
        self._wait(grace_seconds, until=lambda: bool(self._failures) or self._signals.is_impatient)
        if self._failures:
            self.end_after_loss()
        else:
            self.stop(signal.SIGTERM, 0.0)

    def stop(self, number: signal.Signals, grace_seconds: float) -> None:
        """End every worker. Running workers get signal `number`, unless they failed or were asked
        to end. After `grace_seconds`, running workers get SIGKILL."""
        self._look()
        self.connections.release()
        self._files_of(0).signal_forwarded.touch()
        for worker in (self._workers[rank] for rank in self.healthy):
            worker.is_stopped = True
            if not worker.is_asked:
                worker.signal(number)
        self._wait(grace_seconds, until=lambda: self._signals.is_impatient)
        for rank in self.running:
            self._workers[rank].signal(signal.SIGKILL)
        self._wait(KILL_SECONDS, until=lambda: False)

    def kill_what_is_left(self) -> Sequence[str]:
        markers = [self._workers[rank].files.marker for rank in self.lost]
        until = time.monotonic() + LEAVE_SECONDS
        while with_marker(*markers) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        left = kill_all(lambda: with_marker(*markers), KILL_SECONDS)
        return [f"{name} (process {pid})" for pid, name in left.items()]

    def _look(self) -> None:
        for rank, worker in self._workers.items():
            if worker.is_running and (returncode := worker.process.poll()) is not None:
                worker.returncode = returncode
                self._note_end(worker, returncode)
            if worker.failure is None and not (worker.is_stopped or worker.is_preempted):
                worker.failure = _failure(rank, worker)

    def _note_end(self, worker: LaunchedWorker, returncode: int) -> None:
        """Kill the process group of a worker that has ended. The id of a process group may later
        belong to another process."""
        if returncode != 0 or worker.is_stopped:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            kill_all(lambda: with_marker(worker.files.marker), KILL_SECONDS)
        worker.is_preempted = returncode == PREEMPTED_STATUS and not worker.files.failure.exists()
        # the launcher is ending all workers: this one waited for a lost peer, and ended itself
        worker.is_stopped |= (returncode == -signal.SIGTERM and worker.is_asked) or (
            returncode == 128 + signal.SIGTERM and self._is_shutting_down
        )

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        began = time.monotonic()
        while self.running and not until():
            is_saving = any(self._workers[rank].files.saving.exists() for rank in self.running)
            if time.monotonic() - began > (max(seconds, SAVE_SECONDS) if is_saving else seconds):
                return
            time.sleep(POLL_SECONDS)
            self._look()

    def _files_of(self, rank: int) -> WorkerFiles:
        if rank in self._workers:
            return self._workers[rank].files
        return WorkerFiles(self.folder / f"{self._name}-{rank}")


def _variables(files: WorkerFiles, **told: Any) -> dict[str, str]:
    start = WorkerStart(launcher=os.getpid(), files=str(files.stem), **told)
    torch_error = {"TORCHELASTIC_ERROR_FILE": str(files.torch_error)}
    return {**start.variables(), STARTED_BY: str(files.stem), **torch_error}


def _failure(rank: int, worker: LaunchedWorker) -> WorkerFailure | None:
    files, returncode = worker.files, worker.returncode
    record = FailureRecord.read(files.failure)
    if record is None and not returncode:
        return None
    if record is None and returncode is not None and returncode > 0:
        record = read_torch_record(files.torch_error, returncode)
    return WorkerFailure(
        rank=rank,
        time=record.time if record is not None else time.time(),
        returncode=returncode if returncode is not None else 1,
        record=record,
        crash=read_crash(files.crash),
    )
