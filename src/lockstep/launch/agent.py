"""Start, watch, end and restart the workers of this machine, with torch's elastic agent.

[Note: restarts] Torch's loop decides. It asks `_monitor_workers`; if that reports a failure and restarts are left, or
if another machine waits to join, the loop stops the workers, meets the other machines and starts new workers. Each
start has a new store and port, a new folder for the workers' files, and new `WorkerProcesses`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from lockstep.base.errors import LaunchError, say
from lockstep.base.system import signals
from lockstep.launch.environment import Launcher, threads_per_process
from lockstep.launch.failures import Ending
from lockstep.launch.launcher_folder import launcher_folder
from lockstep.launch.machines import Machines
from lockstep.launch.rendezvous import JOIN_SECONDS, SILENCE_SECONDS, ElasticRendezvous, LoopbackRendezvous
from lockstep.launch.seeding import HASH_SEED
from lockstep.launch.worker_processes import POLL_SECONDS, Start, WorkerProcesses
from lockstep.options import RunOptions, variable

GRACE_SECONDS = dict.fromkeys(signals("SIGINT", "SIGQUIT"), 5.0) | dict.fromkeys(signals("SIGTERM", "SIGUSR1", "SIGHUP"), 30.0)
"""Seconds from a signal, which the launcher passes on, to SIGKILL. A second signal ends the wait."""

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_REGROUPS = "lockstep/regroups"
"""Key in the store of a start: the workers save and end because they are to be restarted."""
_DONE, _KNOWN = "lockstep/done", "lockstep/known"
"""Keys in the same store: the number of machines whose workers are done, and of machines that know that all are."""
_FAILED, _LOST_A_PEER, _JOINED = range(3)
"""Why a machine restarts its workers. If machines differ, the first of these is the cause."""


def run_workers(
    start: Start,
    *,
    count: int,
    launcher: Launcher,
    options: RunOptions,
    max_restarts: int = 0,
    machines: Machines | None = None,
    command: str = "",
) -> Ending:
    """Start `count` workers, wait for all of them, and return how they ended. If one fails, the others are stopped.

    After a failure all are started again, up to `max_restarts` times, unless it was a `UserError`. Workers get the
    `options` in their environment. In the main thread, SIGINT, SIGTERM, SIGUSR1, SIGHUP and SIGQUIT are passed on to
    the workers, except those that this process ignores; the handlers from before are put back at the end. `machines`:
    the run is on several machines. Its workers also start again when a machine is lost or joins. Each machine calls
    this with the same `command`. Raises `LaunchError` if they cannot meet.
    """
    with launcher_folder() as folder, _quiet_torch():
        rendezvous = LoopbackRendezvous() if machines is None else ElasticRendezvous.at(machines)
        if isinstance(rendezvous, ElasticRendezvous):
            _check_command(rendezvous, command)
            if options.default_run_dir is not None:
                options = replace(options, default_run_dir=rendezvous.agree("default_run_dir", options.default_run_dir))
        # The entry point is a name for torch's logs: `start` is what starts a worker.
        spec = WorkerSpec(
            role="default",
            local_world_size=count,
            rdzv_handler=rendezvous,
            entrypoint="worker",
            max_restarts=max_restarts,
            monitor_interval=POLL_SECONDS,
        )
        chosen = {"OMP_NUM_THREADS": str(threads_per_process(count)), **HASH_SEED}
        if rendezvous.interface is not None:
            chosen |= dict.fromkeys(_INTERFACES, rendezvous.interface)
        asked = _INTERFACES if machines is not None and machines.interface is not None else ()
        environment = {"LOCKSTEP_LAUNCHER": launcher, **options.to_environment()}
        environment |= {name: value for name, value in chosen.items() if name not in os.environ or name in asked}
        agent = Agent(spec, start, environment, folder)
        ending = None
        try:
            ending = agent.run_to_the_end(machines)
            return ending
        finally:
            # As under torchrun, the other machines may go on without one that was asked to end.
            if machines is None or ending is None or ending.signal is None:
                rendezvous.shutdown()


def _check_command(rendezvous: ElasticRendezvous, command: str) -> None:
    first = rendezvous.agree("command", command)
    if first != command:
        raise LaunchError(
            f"this machine was to run {command!r}, and the first that came to {rendezvous.machines.endpoint} runs {first!r}; every machine "
            "of a run is given the same command; give that one, or another port for another run"
        )


class Agent(SimpleElasticAgent):
    """torch's agent, with worker processes that we start, judge and end ourselves. See [Note: restarts]."""

    def __init__(self, spec: WorkerSpec, start: Start, given: Mapping[str, str], folder: Path) -> None:
        super().__init__(spec)
        self._start = start
        self._given = dict(given)
        self._folder = folder
        self._starts = 0
        self._counted = frozenset[str]()
        self._why: tuple[int, str] | None = None
        self._machines: Sequence[str] = ()
        self._lost: Sequence[str] = ()
        self._elsewhere = ""
        self._signal: signal.Signals | None = None
        self._impatient = False
        self._starting = False
        self._ending = False
        self._workers = WorkerProcesses(folder, self._is_impatient)

    def run_to_the_end(self, machines: Machines | None) -> Ending:
        with self._handling_signals():
            try:
                self.run()
            except SignalException:
                pass
            except (RendezvousError, DistError) as error:
                if machines is None:
                    raise
                self._elsewhere = _rendezvous_error(error, machines)
        return replace(self._workers.ending(), signal=self._signal, elsewhere=self._elsewhere, new_run_dir=self._new_run_dir())

    def _new_run_dir(self) -> str:
        """The run directory that the launcher chose, if the run wrote to it, else empty."""
        path = self._given.get(variable("default_run_dir"), "")
        return path if path and variable("run_dir") not in self._given and os.path.isdir(path) else ""

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Pass signals on to the workers. Signals that this process ignores (nohup, a background job) stay ignored."""
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
            self._impatient = True
            return
        self._signal = signal.Signals(number)
        if not self._starting:
            raise SignalException(self._signal.name, self._signal)

    def _is_impatient(self) -> bool:
        return self._impatient

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other machines, and agree with them on the number of restarts and the reason of this one."""
        super()._rendezvous(worker_group)
        group: Any = worker_group  # torch says of its fields that they are None
        store, machines = group.store, group.spec.rdzv_handler.addresses
        mine = [worker_group.spec.max_restarts - self._remaining_restarts, self._machines, self._why]
        store.set(f"lockstep/agent-{group.group_rank}", json.dumps(mine))
        everyone = [json.loads(store.get(f"lockstep/agent-{each}")) for each in range(len(machines))]
        self._remaining_restarts = max(0, worker_group.spec.max_restarts - max(restarts for restarts, _, _ in everyone))
        if why := restart_reason(everyone, machines):
            # Whatever --resume was given: by now the run directory may hold an unfinished run.
            self._given |= RunOptions(restarted=why, resume="auto").to_environment()
        self._machines, self._why = machines, None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._starts += 1
        self._counted = frozenset[str]()
        records = self._folder / f"start-{self._starts}"
        records.mkdir()
        self._workers = WorkerProcesses(records, self._is_impatient)
        self._starting = True
        try:
            pids = {
                member.local_rank: self._workers.add(
                    member.global_rank, self._start, self._given | self._torch_variables(worker_group, member)
                )
                for member in worker_group.workers
            }
        finally:
            self._starting = False
        if self._signal is not None:
            raise SignalException(self._signal.name, self._signal)
        return pids

    def _torch_variables(self, group: WorkerGroup, member: Any) -> dict[str, str]:
        """The variables that torchrun sets."""
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
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        return {name: str(value) for name, value in values.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._workers.have_failed() or (self._workers.running and self._lost_a_machine()):
            return self._failed()
        if self._workers.running:
            continues = True
        elif self._workers.ending().was_preempted:
            continues = self._regroups(worker_group.store)
        elif continues := self._count(_DONE) < self._group_size:
            if self._lost_a_machine():
                return self._failed()
            if worker_group.spec.rdzv_handler.is_closed():
                raise RendezvousClosedError
        if continues:
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._workers.ranks))

    def _failed(self) -> RunResult:
        self._ending = True
        self._workers.end_after_loss()
        self._count_failure()
        return RunResult(state=WorkerState.FAILED)

    @property
    def _group_size(self) -> int:
        """Machines."""
        group: Any = self._worker_group
        return int(group.group_world_size)

    def _count(self, what: str) -> int:
        """The number of machines that have called this with `what` in this start, this one included."""
        store: Any = self._worker_group.store
        first, self._counted = what not in self._counted, self._counted | {what}
        return int(store.add(what, int(first)))

    def _count_failure(self) -> None:
        """Announce a restart, or set the restarts left to 0 if these failures must not cause one."""
        ending = self._workers.ending()
        first = ending.first
        by_mistake = first is not None and first.record is not None and first.record.user_error
        if self._impatient or ending.unkillable or ending.preempted or by_mistake:
            self._remaining_restarts = 0
        elif reason := self._workers.restart_request():
            self._remaining_restarts += 1  # torch's loop subtracts it: this restart does not count
            self._why = (_FAILED, reason)
            self._ending = False
            say(f"lockstep: {reason}; starts again")
            return
        silent = f"lost the machine {', '.join(self._lost)}: its workers failed, or it has been silent for {SILENCE_SECONDS} s"
        line = silent if first is None else first.line
        self._why = (_LOST_A_PEER if first is None or first.lost_a_peer else _FAILED, line)
        if self._remaining_restarts:
            self._ending = False
            limit = self._worker_group.spec.max_restarts
            say(f"lockstep: {line}; restart {limit - self._remaining_restarts + 1} of {limit}")
        elif first is None:
            self._elsewhere = line

    def _lost_a_machine(self) -> bool:
        """True if another machine has left, and the workers here, not asked to save, may wait for it for minutes."""
        group = self._worker_group
        rendezvous = group.spec.rdzv_handler
        self._lost = rendezvous.lost_machines() if isinstance(rendezvous, ElasticRendezvous) else ()
        return bool(self._lost) and not self._regroups(group.store)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._workers.running:
            self._regroup(worker_group)
        ending = self._workers.ending()
        if not self._lost and not ending.preempted and len(ending.finished) == len(self._workers.ranks):
            return  # they are done
        super()._restart_workers(worker_group)

    def _regroup(self, worker_group: WorkerGroup) -> None:
        """Have the workers of all machines save and end, to start again with the machine that waits."""
        say("lockstep: another machine waits to join: the workers save, and start again with it")
        self._why = (_JOINED, "another machine joined")
        store: Any = worker_group.store
        store.set(_REGROUPS, "")
        self._workers.ask(signal.SIGTERM, GRACE_SECONDS[signal.SIGTERM])

    def _regroups(self, store: Any) -> bool:
        """True if the workers of all machines save and end because they are to be restarted."""
        try:
            return bool(store.check([_REGROUPS]))
        except DistError:
            return False  # the machine that keeps it has ended

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._signal is not None:
            self._ending = True
            self._workers.stop(death_sig, GRACE_SECONDS[self._signal])
        elif self._workers.running:
            self._ending = True
            self._workers.end_after_loss()

    def _exit_barrier(self) -> None:
        """Wait a moment, on the machine that hosts the store, until the others know too that all are done.

        Torch's own barrier waits five minutes for a machine whose workers have failed, and does not react to signals.
        """
        rendezvous = self._worker_group.spec.rdzv_handler
        if self._workers.ending().was_preempted or not isinstance(rendezvous, ElasticRendezvous):
            return
        until = time.monotonic() + SILENCE_SECONDS
        while self._count(_KNOWN) < self._group_size and rendezvous.hosts_store and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # torch's own asks the name service for this host's name, each time, and nobody reads the event.
        return Event(f"torchelastic.worker.status.{state}", source)


def restart_reason(everyone: Sequence[Any], machines: Sequence[str]) -> str | None:
    """The reason for a restart; None at the first start.

    `everyone`: from each machine its restarts, the addresses of the machines before, and the kind and the words of its
    own reason. `machines`: the addresses of the machines now.
    """
    reasons = [why for _, _, why in everyone if why is not None]
    if not reasons:
        return None
    kind, words = min(reasons)
    before = max((addresses for _, addresses, _ in everyone), key=len)
    if kind == _LOST_A_PEER and len(machines) < len(before):
        lost = (Counter(before) - Counter(machines)).elements()
        return f"a machine was lost: {', '.join(lost)}; {len(machines)} of {len(before)} are left"
    return str(words)


def _rendezvous_error(error: Exception, machines: Machines) -> str:
    if isinstance(error, RendezvousClosedError):
        return f"the run at {machines.endpoint} was ended by another machine, whose own output says why"
    if isinstance(error, RendezvousTimeoutError):
        return f"fewer than {machines.least} machines came to {machines.endpoint} within {JOIN_SECONDS} s; start the same command on them"
    return (
        f"the rendezvous at {machines.endpoint} is gone: the machine that keeps it has ended, or cannot be reached; what was saved is in "
        "the run directory; the same command (with --run-dir, if it had none), started again on every machine, resumes from there"
    )


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keep torch's log out of the script's output, unless LOGLEVEL is set."""
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
