"""Start, watch and end the workers of one machine, on torch's elastic agent.

[Note: what is heard] Everything listens on loopback alone: the store on a socket bound here, Gloo and NCCL by their interface variables.
Whoever can log in on this machine can still connect to the store, which asks nobody for a name.

[Note: the end] A worker has failed when its process ends with a status other than 0 or its record is there, whichever the agent sees
first. What follows takes at most LATER_PEER_SECONDS + STOP_SECONDS + KILL_SECONDS: the agent waits a moment for the failures that come
with it (long, where all it saw so far are lost peers, so that the cause is not missed), stops the rest, and kills what is left.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.launch import worker
from lockstep.launch.environment import Launcher, threads_per_process
from lockstep.launch.failure import Ending, Failure, Record, read_crash, read_torch_record
from lockstep.launch.termination import PREEMPTED_STATUS

LOOPBACK = "127.0.0.1"

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
GRACE_SECONDS = {signal.SIGINT: 5.0, signal.SIGTERM: 30.0, signal.SIGUSR1: 30.0, signal.SIGHUP: 30.0, signal.SIGQUIT: 5.0}
"""From a signal that the launcher got and passed on to SIGKILL. A second signal ends the wait."""


class Process(Protocol):
    """A worker process: `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """None while it runs; then its exit status, or minus the number of the signal that killed it."""


Start = Callable[[Mapping[str, str]], Process]
"""Starts one worker with these variables added to the environment. Called in order of local ranks."""


def run_workers(start: Start, *, count: int, launcher: Launcher, given: Mapping[str, str | None]) -> Ending:
    """Start `count` workers, wait for all of them, and say how they ended. On a failure of any, the others are stopped.

    `given` goes to the workers, where it is not None: `run_dir` as LOCKSTEP_RUN_DIR (see `Environment`). In the main thread, SIGINT,
    SIGTERM, SIGUSR1, SIGHUP and SIGQUIT are passed on to the workers; what handled them before is put back at the end.
    """
    variables = {"LOCKSTEP_LAUNCHER": launcher} | {f"LOCKSTEP_{name.upper()}": value for name, value in given.items() if value is not None}
    with tempfile.TemporaryDirectory(prefix="lockstep-") as records, _quiet_torch():
        rendezvous = LoopbackRendezvous()
        # The entry point is a name for torch's own accounts: `start` is what starts a worker.
        spec = WorkerSpec(
            role="default",
            local_world_size=count,
            rdzv_handler=rendezvous,
            entrypoint="worker",
            max_restarts=0,
            monitor_interval=POLL_SECONDS,
        )
        agent = Agent(spec, start, variables, Path(records))
        try:
            with agent.handling_signals(), suppress(SignalException):
                agent.run()
            return agent.ending()
        finally:
            rendezvous.shutdown()


class LoopbackRendezvous(RendezvousHandler):
    """One machine meets itself: a store on a free port of loopback, which the workers use too."""

    def __init__(self) -> None:
        self._run_id = f"lockstep-{secrets.token_hex(8)}"
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "lockstep-loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            listener = socket.create_server((LOOPBACK, 0))
            port = listener.getsockname()[1]
            self._store = TCPStore(
                LOOPBACK,
                port,
                is_master=True,
                timeout=timedelta(seconds=60),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        address = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


class Agent(SimpleElasticAgent):
    """torch's agent, with worker processes that we start, judge and end ourselves. See [Note: the end]."""

    def __init__(self, spec: WorkerSpec, start: Start, given: Mapping[str, str], records: Path) -> None:
        super().__init__(spec)
        self._start = start
        self._given = dict(given)
        self._records = records
        self._processes: dict[int, Process] = {}
        self._returncodes: dict[int, int] = {}
        self._failures: dict[int, Failure] = {}
        self._stopped: set[int] = set()
        self._preempted: set[int] = set()
        self._starting = False
        self._ending = False
        self._signal: signal.Signals | None = None
        self._hurried = False

    def ending(self) -> Ending:
        failed = self._failures.keys()
        return Ending(
            failures=list(self._failures.values()),
            stopped=sorted(self._stopped - failed - self._preempted),
            finished=sorted(rank for rank in self._returncodes if rank not in failed | self._stopped | self._preempted),
            preempted=sorted(self._preempted),
            left=self._running(),
            signal=self._signal,
        )

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Pass signals on to the workers while inside. Signals that were ignored (nohup, a background job) stay ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in GRACE_SECONDS}
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._ending or self._signal is not None:
            self._hurried = True
            return
        self._signal = signal.Signals(number)
        if not self._starting:
            raise SignalException(self._signal.name, self._signal)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._starting = True
        try:
            for member in worker_group.workers:
                rank = member.global_rank
                environment = self._given | self._torch_variables(worker_group, member) | self._own_variables(rank)
                self._processes[rank] = self._start(environment)
        finally:
            self._starting = False
        if self._signal is not None:
            raise SignalException(self._signal.name, self._signal)
        return {member.local_rank: self._processes[member.global_rank].pid for member in worker_group.workers}

    def _torch_variables(self, group: WorkerGroup, member: Any) -> dict[str, str]:
        """What torchrun sets."""
        spec = group.spec
        values = {
            "RANK": member.global_rank,
            "LOCAL_RANK": member.local_rank,
            "WORLD_SIZE": member.world_size,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "ROLE_NAME": spec.role,
            "ROLE_RANK": member.role_rank,
            "ROLE_WORLD_SIZE": member.role_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": spec.max_restarts - self._remaining_restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
            "TORCHELASTIC_ERROR_FILE": self._file(member.global_rank, "torch"),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        return {name: str(value) for name, value in values.items()}

    def _own_variables(self, rank: int) -> dict[str, str]:
        chosen = {
            "OMP_NUM_THREADS": str(threads_per_process(self._worker_group.spec.local_world_size)),
            "GLOO_SOCKET_IFNAME": _loopback_interface(),
            "NCCL_SOCKET_IFNAME": _loopback_interface(),
        }
        return {
            worker.RECORD: str(self._file(rank, "record")),
            worker.CRASH: str(self._file(rank, "crash")),
            worker.AGENT: str(os.getpid()),
            worker.NEEDS_TIME: str(self._file(rank, "needs-time")),
            worker.IS_OVER: str(self._records / "is-over"),
        } | {name: value for name, value in chosen.items() if name not in os.environ}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look()
        if self._failures:
            self._ending = True
            (self._records / "is-over").touch()
            self._wait_for_later_failures()
            self._stop(signal.SIGTERM, STOP_SECONDS)
            return RunResult(state=WorkerState.FAILED)
        if len(self._returncodes) == len(self._processes):
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._processes))
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._ending = True
        self._stop(death_sig, STOP_SECONDS if self._signal is None else GRACE_SECONDS[self._signal])

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # torch's own asks the name service for this host's name, each time, and nobody reads the event.
        return Event(f"torchelastic.worker.status.{state}", source)

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
        while self._running():
            only_peers = all(failure.record is not None and failure.record.peer_lost for failure in self._failures.values())
            if time.monotonic() - began > (LATER_PEER_SECONDS if only_peers else LATER_SECONDS):
                return
            time.sleep(POLL_SECONDS)
            self._look()

    def _stop(self, number: signal.Signals, grace_seconds: float) -> None:
        """End every worker: `number` to those that run and have not failed, SIGKILL to the groups of all that are left."""
        self._look()
        for rank in self._running():
            if rank not in self._failures:
                self._stopped.add(rank)
                _signal_group(self._processes[rank].pid, number)
        self._wait(grace_seconds, in_a_hurry=lambda: self._hurried)
        for rank in self._running():
            _signal_group(self._processes[rank].pid, signal.SIGKILL)
        self._wait(KILL_SECONDS, in_a_hurry=lambda: False)

    def _wait(self, seconds: float, in_a_hurry: Callable[[], bool]) -> None:
        began = time.monotonic()
        while self._running() and not in_a_hurry():
            needs_time = any(self._file(rank, "needs-time").exists() for rank in self._running())
            if time.monotonic() - began > (max(seconds, SAVE_SECONDS) if needs_time else seconds):
                return
            time.sleep(POLL_SECONDS)
            self._look()

    def _running(self) -> Sequence[int]:
        return [rank for rank in self._processes if rank not in self._returncodes]

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


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """What the user sees is their script's output. Where LOGLEVEL is set they asked for torch's log too."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler, propagate = logging.NullHandler(), logger.propagate
    if "LOGLEVEL" not in os.environ:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
