"""Starts, watches, ends and restarts the workers of this machine, with torch's elastic agent. A
worker is the process of one rank.

[Note: restarts] The loop of torch's agent calls `_monitor_workers`. After a failure, or if another
machine waits to join, the loop stops the workers, holds a rendezvous with all machines, and starts
new workers. Each start of the workers has a new store and port, a new folder for the workers'
files, and new `WorkerProcesses`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from lockstep.base.errors import say
from lockstep.launch.failures import Ending, WorkerFailure
from lockstep.launch.machines import Machines
from lockstep.launch.recovery.in_place import InPlace
from lockstep.launch.rendezvous import (
    ABLE_SECONDS,
    JOIN_SECONDS,
    SILENCE_SECONDS,
    STORE_SILENCE_SECONDS,
    ElasticRendezvous,
)
from lockstep.launch.termination import INTERRUPTED, tell
from lockstep.launch.worker_processes import (
    GRACE_SECONDS,
    POLL_SECONDS,
    SignalForwarding,
    Start,
    WorkerProcesses,
)
from lockstep.options import Restart, RunOptions, variable

_REGROUPS = "lockstep/regroups"
Count = Literal["done", "known"]
"""Counters in the store. `done` counts the machines whose workers have ended. `known` counts the
machines that know that the workers of all machines have ended."""


class StartStore:
    def __init__(self, store: Any) -> None:
        self._store = store
        self._counted = set[Count]()

    def exchange(self, number: int, machines: int, mine: list[Any]) -> list[list[Any]]:
        self._store.set(f"lockstep/agent-{number}", json.dumps(mine))
        return [json.loads(self._store.get(f"lockstep/agent-{each}")) for each in range(machines)]

    def count(self, what: Count) -> int:
        """Count this machine once. Returns the new value of the counter."""
        is_first = what not in self._counted
        self._counted.add(what)
        return int(self._store.add(f"lockstep/{what}", int(is_first)))

    def announce_regroup(self) -> None:
        """Ask the workers of all machines to save and end, because all workers will restart with
        the workers of a joining machine."""
        self._store.set(_REGROUPS, "")

    def regroups(self) -> bool:
        try:
            return bool(self._store.check([_REGROUPS]))
        except DistError:
            return False  # the machine that hosts the store has ended


FAILED, LOST_A_PEER, JOINED = range(3)
"""Kinds of reasons for a restart, most important first. Machines may have different reasons."""


def restart_reason(everyone: Sequence[Any], machines: Sequence[str]) -> str | None:
    """`everyone` has a list for each machine: its number of restarts, the addresses of machines
    that it knew before the restart, and the kind and text of its reason. `machines` has the
    addresses of the machines after the restart."""
    reasons = [why for _, _, why in everyone if why is not None]
    if not reasons:
        return None
    kind, words = min(reasons)
    before = max((addresses for _, addresses, _ in everyone), key=len)
    if kind == LOST_A_PEER and len(machines) < len(before):
        lost = (Counter(before) - Counter(machines)).elements()
        return f"a machine was lost: {', '.join(lost)}; {len(machines)} of {len(before)} are left"
    return str(words)


def restart_variables(
    everyone: Sequence[Any], machines: Sequence[str], *, in_place: bool
) -> dict[str, str]:
    why = restart_reason([each[:3] for each in everyone], machines)
    if why is None:
        return {}
    not_in_place = next((reason for *_, reason, _ in everyone if reason), None)
    restart = Restart(why, in_place, not_in_place)
    # "auto" whatever --resume was: by now the run directory may contain an unfinished run.
    return RunOptions(restarted=restart, resume="auto").to_environment()


def failure_reason(first: WorkerFailure | None, lost: Sequence[str]) -> tuple[int, str]:
    if first is not None:
        return (LOST_A_PEER if first.lost_a_peer else FAILED), first.line
    silent = (
        f"lost the machine {', '.join(lost)}: its workers failed, or it has been silent for"
        f" {SILENCE_SECONDS:g} s"
    )
    return LOST_A_PEER, silent if lost else "another machine has lost a worker"


def rendezvous_error(error: Exception, machines: Machines) -> str:
    if isinstance(error, RendezvousClosedError):
        return (
            f"the run at {machines.endpoint} was ended by another machine, whose own output"
            " says why"
        )
    if isinstance(error, RendezvousTimeoutError):
        return (
            f"fewer than {machines.least} machines came to {machines.endpoint} within"
            f" {JOIN_SECONDS} s; start the same command on them"
        )
    return (
        f"the rendezvous at {machines.endpoint} is gone: the machine that keeps it has ended, or"
        " cannot be reached; what was saved is in the run directory; the same command (with"
        " --run-dir, if it had none), started again on every machine, resumes from there"
    )


LOST, JOINS = "lost", "joins"
"""Reasons for a recovery in place: a worker is lost, or a machine joins."""


class Agent(SimpleElasticAgent):
    def __init__(
        self,
        spec: WorkerSpec,
        start: Start,
        given: Mapping[str, str],
        folder: Path,
        *,
        in_place: InPlace,
        never_in_place: str | None,
    ) -> None:
        """`never_in_place` is the reason why workers cannot recover in place, or None if they can.
        `never_in_place` is empty if recovery in place was not requested."""
        super().__init__(spec)
        self.in_place = in_place
        self._never_in_place = never_in_place
        self._not_in_place: str | None = None
        self.is_joining = False
        """True until this machine has completed the rendezvous with a run that it joins."""
        # True if recovery in place is possible, because all workers of this machine train
        self._is_able = False
        self._count_asked = spec.local_world_size
        # True if after the loss of a worker the run continues with the remaining processes
        self._goes_on = False
        rendezvous = spec.rdzv_handler
        self._elastic = rendezvous if isinstance(rendezvous, ElasticRendezvous) else None
        self._start = start
        self._given = dict(given)
        self._folder = folder
        self._starts = 0
        self._shared = StartStore(None)
        self._why: tuple[int, str] | None = None
        self._machines: Sequence[str] = ()
        self._lost: Sequence[str] = ()
        self._elsewhere = ""
        self._signals = SignalForwarding(self._tell_of_interrupt)
        self._workers = WorkerProcesses(folder, self._signals)

    def close(self) -> None:
        self._close_workers()
        self.in_place.close()

    def _close_workers(self) -> None:
        self._workers.connections.close()
        if left := self._workers.kill_what_is_left():
            say(f"lockstep: killed what the script had started and left running: {', '.join(left)}")

    def run_to_the_end(self, machines: Machines | None) -> Ending:
        with self._signals.handling():
            try:
                self.run()
            except SignalException:
                pass
            except (RendezvousError, DistError) as error:
                if machines is None:
                    raise
                self._elsewhere = rendezvous_error(error, machines)
        return replace(
            self._workers.ending(),
            signal=self._signals.received,
            elsewhere=self._elsewhere,
            new_run_dir=_new_run_dir(self._given),
        )

    def _tell_of_interrupt(self) -> None:
        at_once = "interrupted: the workers are asked to end; Ctrl-C again ends them at once"
        tell(INTERRUPTED if self._workers.ending().options_read else at_once)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """After the rendezvous, all machines agree on the number of restarts, on the reason of the
        restart, and on recovery in place."""
        try:
            super()._rendezvous(worker_group)
            everyone = self._exchange(worker_group)
        except DistStoreError:
            if self._elastic is None or not self._elastic.lost_machines():
                raise
            self._rendezvous(worker_group)  # repeat it without the machine that was lost in it
            return
        machines = worker_group.spec.rdzv_handler.addresses  # type: ignore[attr-defined]
        self._remaining_restarts = max(
            0, worker_group.spec.max_restarts - max(restarts for restarts, *_ in everyone)
        )
        self._goes_on = all(goes_on for *_, goes_on, _, _ in everyone)
        self.in_place.lost_at = max(lost_at for *_, lost_at in everyone)
        self._given |= restart_variables(everyone, machines, in_place=self._goes_on)
        self._machines, self._why, self.is_joining = machines, None, False

    def _exchange(self, worker_group: WorkerGroup) -> list[list[Any]]:
        group: Any = worker_group  # torch declares its fields as None
        self._shared = StartStore(group.store)
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        mine = [restarts, self._machines, self._why, self._goes_on, self._not_in_place]
        mine.append(self.in_place.lost_at)
        return self._shared.exchange(group.group_rank, group.group_world_size, mine)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._new_workers()
        variables = self._variables(worker_group).items()
        with self._signals.deferred():
            pids = [self._workers.add(rank, self._start, own) for rank, own in variables]
        return dict(enumerate(pids))

    def _new_workers(self) -> None:
        self._starts += 1
        records = self._folder / f"start-{self._starts}"
        records.mkdir()
        self._close_workers()
        self._workers = WorkerProcesses(records, self._signals, not_in_place=self._never_in_place)
        self._is_able = False

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        size = 0
        if self._elastic is not None and self._never_in_place is None and not self._starts:
            size = self._elastic.machines_able(ABLE_SECONDS) * self._count_asked
        if not size:
            worker_group.spec.local_world_size = self._count_asked
            super()._initialize_workers(worker_group)
            return
        say("lockstep: the run is under way; this machine's workers are started, and join it then")
        self._new_workers()
        variables = self._variables(worker_group, _after(size, self._count_asked))
        with self._signals.deferred():
            self.in_place.put(self._workers, variables)
        self._goes_on = self.is_joining = True
        self._recover(worker_group)
        worker_group.state = WorkerState.HEALTHY

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        for ranks, record in self._workers.kill_hanging():
            if self._elastic is not None:
                self._elastic.announce(json.dumps([ranks, record]))
        if self._workers.have_failed() or (self._workers.running and self._lost_a_machine()):
            return self._failed()
        # LOST, JOINS, or JSON with the hanging ranks of another machine and the record of the hang
        why = None
        if self._elastic is not None and self._never_in_place is None:
            why = self._elastic.announced()
        if self._workers.running and why is not None and why != JOINS:
            if why != LOST:
                self._workers.kill(*json.loads(why))
            return self._failed()
        if self._workers.running and (
            why == JOINS or (self._is_able and self.in_place.newcomers_are_ready())
        ):
            self._remaining_restarts += 1  # torch's loop subtracts one
            return RunResult(state=WorkerState.FAILED)
        if self._workers.running:
            continues = True
        elif self._workers.ending().was_preempted:
            continues = self._shared.regroups()
        elif continues := self._shared.count("done") < (worker_group.group_world_size or 0):
            if self._lost_a_machine():
                return self._failed()
            if worker_group.spec.rdzv_handler.is_closed():
                raise RendezvousClosedError
        if continues:
            self._prepare_to_recover()
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(
            state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._workers.ranks)
        )

    def _prepare_to_recover(self) -> None:
        workers = self._workers
        if self._never_in_place is not None:
            return
        if workers.connections.why_not(workers.ranks) is not None:
            return
        if not self._is_able and self._elastic is not None:
            self._elastic.note_able()
        self._is_able = True
        if self._remaining_restarts:
            self.in_place.keep_spare(self._given)

    def _failed(self) -> RunResult:
        self._signals.is_ending = True
        why_not = self._leave(LOST)
        if why_not is not None:
            self._workers.end_after_loss()
        self._count_failure()
        return RunResult(state=WorkerState.FAILED)

    def _leave(self, why: str) -> str | None:
        if not self._goes_on:
            self.in_place.lost_at = time.time()
        self._not_in_place = self._why_not_in_place(why)
        if self._not_in_place is None:
            if self._elastic is not None:
                self._elastic.announce(why)
            self._not_in_place = self._workers.hold()
        self._goes_on = self._not_in_place is None
        return self._not_in_place

    def _why_not_in_place(self, why: str) -> str | None:
        if (
            (why == LOST and not self._remaining_restarts)
            or self._workers.restart_request()
            or self._workers.has_user_error()
        ):
            return "the run does not go on with the same plan"
        if self._elastic is not None and not self._elastic.all_are_able():
            return "the training had not begun on all machines, or cannot recover in place there"
        healthy = self._workers.healthy
        others = [rank for rank in self._workers.ranks if rank not in healthy]
        return self._workers.connections.why_not(healthy, others)

    def _count_failure(self) -> None:
        ending = self._workers.ending()
        first, waiting = ending.first, self._goes_on
        by_mistake = first is not None and first.record is not None and first.record.user_error
        stopped = self._signals.received is not None or bool(ending.preempted)
        stopped |= bool(ending.unkillable) and not waiting
        again = waiting and self.in_place.note_losses(
            self._workers.lost_in_training, self._workers.connections.steps_done()
        )
        if stopped or by_mistake or again:
            self._remaining_restarts = 0
        elif reason := self._workers.restart_request():
            # torch's loop subtracts one, but this restart does not count for --max-restarts
            self._remaining_restarts += 1
            self._why = (FAILED, reason)
            self._signals.go_on()
            say(f"lockstep: {reason}; starts again")
            return
        self._why = failure_reason(first, self._lost)
        line = self._why[1]
        if self._remaining_restarts:
            self._signals.go_on()
            limit = self._worker_group.spec.max_restarts
            how = "the others wait; recovery" if waiting else "restart"
            say(f"lockstep: {line}; {how} {limit - self._remaining_restarts + 1} of {limit}")
        elif first is None:
            self._elsewhere = line

    def _lost_a_machine(self) -> bool:
        self._lost = () if self._elastic is None else self._elastic.lost_machines()
        return bool(self._lost) and (self._is_able or not self._shared.regroups())

    def _recover(self, worker_group: WorkerGroup) -> None:
        while True:
            with self._signals.deferred():
                known = self._variables(worker_group)
                self.in_place.fill_places(
                    self._workers, known.__getitem__, partial(self._newcomers, worker_group)
                )
            if self.in_place.all_are_ready(self._workers):
                break
            self._failed()
            if not self._remaining_restarts or not self._goes_on:
                return  # the next check of the workers detects the failure
            self._remaining_restarts -= 1
        if self._elastic is not None:
            self._elastic.wait_for_all()
        worker_group.spec.local_world_size = len(self._workers.ranks)
        self._rendezvous(worker_group)
        if self._goes_on:
            self._workers.renumber([each.global_rank for each in worker_group.workers])
            self._workers.connections.rejoin(
                self._variables(worker_group), lost_at=self.in_place.lost_at
            )
            self._is_able = False
        else:  # the workers of another machine cannot continue in their processes
            self._workers.end_after_loss()
            self._start_workers(worker_group)
        self._goes_on = False

    def _newcomers(
        self, group: WorkerGroup, count: int
    ) -> tuple[WorkerProcesses, dict[int, dict[str, str]]]:
        self._starts += 1
        name = f"newcomer-{self._starts}"
        kept = WorkerProcesses(self._workers.folder, self._signals, not_in_place=None, name=name)
        return kept, self._variables(group, _after(group.workers[0].world_size, count))

    def _variables(
        self, group: WorkerGroup, workers: Sequence[Worker] | None = None
    ) -> dict[int, dict[str, str]]:
        restarts = group.spec.max_restarts - self._remaining_restarts
        each_of = group.workers if workers is None else workers
        return {
            each.global_rank: self._given | _torch_variables(group, each, restarts)
            for each in each_of
        }

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._goes_on or (self._workers.running and self._takes_in()):
            self._recover(worker_group)
            return
        if self._workers.running:
            self._regroup(worker_group)
        ending = self._workers.ending()
        are_done = len(ending.finished) == len(self._workers.ranks) and not ending.preempted
        if not are_done or self._lost:
            super()._restart_workers(worker_group)

    def _takes_in(self) -> bool:
        if self._never_in_place is not None or self._leave(JOINS) is not None:
            return False
        who = "another machine" if self._elastic is not None else "a new process"
        say(f"lockstep: {who} joins: the workers wait for it")
        self._why = (JOINED, f"{who} joined")
        return True

    def _regroup(self, worker_group: WorkerGroup) -> None:
        say("lockstep: another machine waits to join: the workers save, and start again with it")
        self._why = (JOINED, "another machine joined")
        self._shared.announce_regroup()
        self._workers.ask(signal.SIGTERM, GRACE_SECONDS[signal.SIGTERM])

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._signals.received is not None:
            self._signals.is_ending = True
            self._workers.stop(death_sig, GRACE_SECONDS[self._signals.received])
        elif self._workers.running:
            self._signals.is_ending = True
            self._workers.end_after_loss()

    def _exit_barrier(self) -> None:
        """On the machine that hosts the store, wait briefly until all machines know that the
        workers have ended. Torch's barrier waits five minutes for a machine whose workers have
        failed, and ignores signals."""
        rendezvous = self._elastic
        if rendezvous is None or self._workers.ending().was_preempted:
            return
        until = time.monotonic() + STORE_SILENCE_SECONDS
        while (
            self._shared.count("known") < (self._worker_group.group_world_size or 0)
            and rendezvous.hosts_store
            and time.monotonic() < until
        ):
            time.sleep(POLL_SECONDS)

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # torch's version looks up this host's name each time, for an event that nobody reads
        return Event(f"torchelastic.worker.status.{state}", source)


def _new_run_dir(given: Mapping[str, str]) -> str:
    path = given.get(variable("default_run_dir"), "")
    return path if path and variable("run_dir") not in given and os.path.isdir(path) else ""


def _after(size: int, count: int) -> list[Worker]:
    ranks = range(size, size + count)
    return [Worker(rank - size, rank, rank, ranks.stop, ranks.stop) for rank in ranks]


def _torch_variables(group: WorkerGroup, member: Any, restarts: int) -> dict[str, str]:
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
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {name: str(value) for name, value in values.items()}
