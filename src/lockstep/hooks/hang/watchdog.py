"""The watchdog of each rank, and the hook that handles a hang. The watchdog collects the stack
snapshots of all ranks if the training thread exceeds a timeout. After a hang, the hook writes a
report, saves the last complete step, and ends the process.

[Note: rounds] Each collection of snapshots is a round with new keys in torch's store. The first
late rank that writes the round's key collects the snapshots, and writes the diagnosis for all
ranks. The collecting rank waits for every rank that may still answer, because a busy machine is
slow.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.base.container import process_id_space
from lockstep.base.errors import (
    USER_ERROR_STATUS,
    HangError,
    LockstepError,
    RecipeError,
    cannot_write,
    say,
)
from lockstep.base.torch_private import clone_store, default_store
from lockstep.comm import gloo_sockets
from lockstep.comm.first_failure import FirstFailure
from lockstep.comm.native_end import NativeEnd
from lockstep.hooks.hang.report import Hang, diagnose_hang, different_exchanges
from lockstep.hooks.hang.snapshot import (
    StackSnapshot,
    StackWriter,
    innermost_line,
    read_stack,
    take_snapshot,
)
from lockstep.launch.failures import failure_record
from lockstep.launch.termination import HUNG_STATUS
from lockstep.launch.worker_files import defer_kill, is_shutting_down, write_failure
from lockstep.logging.phases import Phases
from lockstep.options import WatchdogTimeouts
from lockstep.training.context import Context
from lockstep.training.hook import Hook
from lockstep.training.recovery import Recovery
from lockstep.training.reducers.agreement import StepAgreement
from lockstep.training.run import Run

TICK_SECONDS = 0.2
ANSWER_SECONDS = 1.2
"""Time without a rank's snapshot after which the collecting rank checks the rank's process. The
process may have ended, or be stopped."""
SILENCE_SECONDS = 10.0
"""Time without a rank's snapshot after which the rank counts as hanging."""
# seconds after the launcher begins to end the run, after which the watchdog ends a rank that still
# waits for another rank
STUCK_SECONDS = 1.0
# seconds from a diagnosis that finds no hang until a rank asks for snapshots again
AGAIN_SECONDS = 2.0
EXCHANGE_SECONDS = 5.0
"""Duration of an all-gather or reduction of shards after which ranks compare the blocks that they
exchange."""
ABORT_SECONDS = 10.0
"""Time limit for a rank to raise its error after the watchdog has closed Gloo's connections."""


class Mailbox:
    """Exchanges texts between ranks through torch's store. Without a store process, all methods
    raise `DistError` or `RuntimeError`."""

    def __init__(self, store: Any, prefix: str) -> None:
        # a connection of its own: it does not wait for other threads' requests, and can be closed
        connection, self._socket = (
            gloo_sockets.with_own_connection(store)
            if sys.platform == "linux"
            else (clone_store(store), None)
        )
        connection.set_timeout(timedelta(seconds=SILENCE_SECONDS))
        self._store = dist.PrefixStore(prefix, connection)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close the connection, and end a request of another thread to a machine that does not
        answer."""
        if self._socket is not None:
            gloo_sockets.shut_down(self._socket)

    def put(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def take(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        found: bytes = self._store.get(key)
        return found.decode()

    def put_if_new(self, key: str, text: str) -> bool:
        """Return True if the store did not have the key."""
        stored: bytes = self._store.compare_set(key, "", text)
        return stored.decode() == text


@dataclass(slots=True, eq=False)
class Watchdog:
    """Detects a hang of the training thread, in which the watchdog must be created. Every rank
    creates a watchdog."""

    phases: Phases
    timeouts: WatchdogTimeouts
    rank: int
    size: int
    mailbox: Mailbox | None  # None with one process
    on_hang: Callable[[Hang, Mapping[int, StackSnapshot], bool, StackSnapshot], None]
    """Called in the watchdog's thread, on every rank."""
    is_shutting_down: Callable[[], bool]  # True if the launcher is ending the run
    is_recovered: Callable[[Hang], bool]
    """True if the launcher replaces the hanging ranks by new processes."""
    # called in the watchdog's thread if the run ends and this rank still waits after
    # `STUCK_SECONDS`
    on_stuck: Callable[[], None]
    agreements: Callable[[], Sequence[StepAgreement]]
    has_peer_failed: Callable[[], bool]
    """True if another rank has ended its run with an error."""
    # True if the watchdog's thread is about to end this process; then no other thread may end it
    ends_the_process: bool = False
    _shutting_down_since: float | None = None
    _training_thread: threading.Thread = field(default_factory=threading.current_thread)
    _closed: threading.Event = field(default_factory=threading.Event)
    _is_cut_off: bool = False
    _round: int = 0
    _not_before: float = 0.0
    _compares_after: float = EXCHANGE_SECONDS
    _looks_after: float = 0.0
    _is_ending: bool = False
    _compared: threading.Event = field(default_factory=threading.Event)
    _reported_since: float | None = None
    _known: dict[int, dict[str, Any]] = field(default_factory=dict)
    _stacks: StackWriter = field(default_factory=StackWriter)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="lockstep-watchdog", daemon=True)
        if self.mailbox is not None:
            who = {
                "host": socket.gethostname(),
                "process_ids": process_id_space(),
                "process": os.getpid(),
                "stacks": self._stacks.descriptor,
            }
            self.mailbox.put(f"who/{self.rank}", json.dumps(who))
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * TICK_SECONDS)
            if self._thread.is_alive() and self.mailbox is not None:
                self.mailbox.close()
            self._thread.join()
        self._stacks.close()

    def _run(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            if self.is_shutting_down() and self._is_stuck():
                self.ends_the_process = True
                self.on_stuck()
            self._leave_failed_peer()
            try:
                if not self._is_cut_off:
                    if self._must_ask() or self._take(f"{self._round}/asked") is not None:
                        self._take_part()
                    continue
            # the store has ended, or cannot be reached
            except (dist.DistError, RuntimeError) as error:
                # torch does not reconnect, and logs each attempt
                self._is_cut_off = isinstance(error, dist.DistNetworkError)
            if not self._closed.is_set() and self._must_ask():
                self._report_alone()

    def _is_stuck(self) -> bool:
        self._shutting_down_since = self._shutting_down_since or time.monotonic()
        return (
            time.monotonic() - self._shutting_down_since >= STUCK_SECONDS
            and self._snapshot().activity == "waits"
        )

    def _leave_failed_peer(self) -> bool:
        """End this rank's wait by closing Gloo's connections if another rank has ended its run with
        an error. The process of the failed rank may live on, as a notebook does, and keep its
        connections open."""
        if self.phases.seconds < self._looks_after:
            self._looks_after = min(self._looks_after, self.phases.seconds + EXCHANGE_SECONDS)
            return False
        self._looks_after = self.phases.seconds + EXCHANGE_SECONDS
        if not (self.has_peer_failed() and self._snapshot().activity == "waits"):
            return False
        gloo_sockets.shut_down_gloo_sockets()
        return True

    def _limit_seconds(self) -> float:
        return self.timeouts.limit_seconds(self.phases.name, self.phases.usual(self.phases.name))

    def _must_ask(self) -> bool:
        return (
            (self.phases.seconds >= self._limit_seconds() or self._must_compare())
            and time.monotonic() >= self._not_before
            and self._reported_since != self.phases.since
        )

    def _must_compare(self) -> bool:
        if self._is_ending:
            return not self._compared.is_set()
        seconds = max((each.seconds for each in self.agreements()), default=0.0)
        if seconds < EXCHANGE_SECONDS:
            self._compares_after = EXCHANGE_SECONDS
        if self.mailbox is None or seconds < self._compares_after:
            return False
        self._compares_after = 2 * seconds
        return True

    def _take(self, key: str) -> str | None:
        return None if self.mailbox is None else self.mailbox.take(key)

    def _snapshot(self) -> StackSnapshot:
        has_usual = self.phases.usual(self.phases.name) is not None
        mine = take_snapshot(
            self.rank,
            self._training_thread,
            self.phases,
            limit_seconds=self._limit_seconds(),
            is_first=self.timeouts.fixed_seconds is None and not has_usual,
            exchanges=[exchanges for each in self.agreements() for exchanges in each.recent()],
        )
        if mine.is_late and mine.activity != "waits":
            return replace(mine, children=self._stacks.of_children())
        return mine

    def _take_part(self) -> None:
        number = self._round
        if self.mailbox is None:
            mine = self._snapshot()
            self._conclude(
                diagnose_hang({self.rank: mine}, {}), {self.rank: mine}, mine, collected=True
            )
            return
        collects = self.mailbox.put_if_new(f"{number}/asked", str(self.rank))
        mine = self._snapshot()
        self.mailbox.put(f"{number}/{self.rank}", json.dumps(asdict(mine)))
        snapshots: dict[int, StackSnapshot] = {}
        if collects:
            found = self._collect(number)
            if found is None:
                return
            snapshots, silent = {self.rank: mine} | found[0], found[1]
            hang = different_exchanges(snapshots)
            if hang is None and any(each.is_late for each in snapshots.values()):
                hang = diagnose_hang(snapshots, silent)
            self.mailbox.put(f"{number}/diagnosis", json.dumps(hang and asdict(hang)))
        else:
            told = self._wait_for_diagnosis(number)
            if told is None:
                return
            fields = json.loads(told)
            hang = Hang(**{**fields, "ranks": tuple(fields["ranks"])}) if fields else None
        self._round += 1
        if self._is_ending and hang is None:
            self._compared.set()
        self._conclude(hang, snapshots, mine, collected=collects)

    def _collect(self, number: int) -> tuple[dict[int, StackSnapshot], dict[int, str]] | None:
        """Return the snapshots, and the ranks that do not answer, each with the reason. None if the
        run ends meanwhile."""
        assert self.mailbox is not None
        snapshots, silent = dict[int, StackSnapshot](), dict[int, str]()
        missing, asked = set(range(self.size)) - {self.rank}, time.monotonic()
        while missing:
            waited = time.monotonic() - asked
            for rank in sorted(missing):
                if (text := self.mailbox.take(f"{number}/{rank}")) is not None:
                    snapshots[rank] = StackSnapshot.from_json(json.loads(text))
                elif waited >= SILENCE_SECONDS:
                    silent[rank] = _why_silent(self._who(rank))
                elif waited >= ANSWER_SECONDS and (end := _end_of(self._who(rank))) is not None:
                    silent[rank] = end
            missing -= snapshots.keys() | silent.keys()
            if missing and self._ends_within(TICK_SECONDS / 4):
                return None
        return snapshots, silent

    def _wait_for_diagnosis(self, number: int) -> str | None:
        """Return a `Hang` as JSON. Returns "null" if there is no hang, or if the collecting rank
        does not answer. None if the run ends meanwhile."""
        assert self.mailbox is not None
        asked = time.monotonic()
        while (text := self.mailbox.take(f"{number}/diagnosis")) is None:
            waited = time.monotonic() - asked
            collector = int(self.mailbox.take(f"{number}/asked") or self.rank)
            if waited >= 2 * SILENCE_SECONDS or (
                waited >= ANSWER_SECONDS and _end_of(self._who(collector)) is not None
            ):
                return "null"
            if self._ends_within(TICK_SECONDS / 4):
                return None
        return text

    def _ends_within(self, seconds: float) -> bool:
        return self._closed.wait(seconds) or self.is_shutting_down() or self._leave_failed_peer()

    def _who(self, rank: int) -> dict[str, Any] | None:
        if rank not in self._known:
            if (text := self._take(f"who/{rank}")) is None:
                return None
            self._known[rank] = json.loads(text)
        return self._known[rank]

    def _conclude(
        self,
        hang: Hang | None,
        snapshots: Mapping[int, StackSnapshot],
        mine: StackSnapshot,
        *,
        collected: bool,
    ) -> None:
        if hang is None:
            self._not_before = time.monotonic() + AGAIN_SECONDS
            return
        self._reported_since = self.phases.since
        self.ends_the_process = (
            self.timeouts.on_hang == "end" and not self.is_recovered(hang) and hang.kind != "order"
        )
        self.on_hang(hang, snapshots, collected, mine)

    def before_native_end(self) -> None:
        """Called in a thread of Gloo before Gloo ends the process, because it received a tensor of
        the wrong size."""
        if any(each.seconds for each in self.agreements()):
            self._is_ending = True
            self._compared.wait(ABORT_SECONDS)

    def wait_until_closed(self, seconds: float) -> bool:
        """Return True if the run ends within `seconds`. If the run has not ended, the watchdog ends
        the process."""
        self.ends_the_process = self._is_ending or not self._closed.wait(seconds)
        return not self.ends_the_process

    def _report_alone(self) -> None:
        """Report a hang from this rank's snapshot only, because torch's store does not answer."""
        mine = self._snapshot()
        reason = (
            "torch's store does not answer: its process has ended, or the network to it is broken"
        )
        others = dict.fromkeys(set(range(self.size)) - {self.rank}, reason)
        self._conclude(diagnose_hang({self.rank: mine}, others), {}, mine, collected=True)


def _end_of(who: Mapping[str, Any] | None) -> str | None:
    if who is None or who["process_ids"] != process_id_space() or sys.platform != "linux":
        return None
    process = who["process"]
    name = f"process {process} on {who['host']}"
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except OSError:
        return f"{name} has ended"
    state = stat.rpartition(")")[2].split()[0]
    if state == "T":
        resume = f"kill -CONT {process} resumes it"
        return f"{name} is stopped (by SIGSTOP, or a debugger); {resume}"
    return f"{name} has ended" if state in "ZX" else None


def _why_silent(who: Mapping[str, Any] | None) -> str:
    if who is None:
        return "it has not started its watchdog yet"
    if (end := _end_of(who)) is not None:
        return end
    process = who["process"]
    silent = f"process {process} on {who['host']} does not answer:"
    if who["process_ids"] != process_id_space():
        return f"{silent} it has ended, it is stopped, or its machine cannot be reached"
    if sys.platform != "linux":
        return f"{silent} it has ended, it is stopped, or native code holds the GIL"
    line = innermost_line(read_stack(process, who["stacks"]))
    called = f", called at {line}" if line else ""
    return f"{silent} native code holds the GIL{called}"


SAVING_SECONDS = 300.0  # time limit for the save that a rank makes before it ends because of a hang
# a rank waits this long before it exits, so that all ranks can read the diagnosis before they
# notice that a peer is lost
EXIT_DELAY_SECONDS = 0.5


class HangHook(Hook):
    def __init__(
        self,
        timeouts: WatchdogTimeouts | None,
        context: Context,
        rescue: Callable[[Run, BaseException], bool],
        recovery: Recovery | None,
    ) -> None:
        """`rescue` saves this rank's state without the other ranks."""
        self._recovery = recovery
        self._timeouts = timeouts
        self._context = context
        self._rescue = rescue
        self._run: Run | None = None
        self._watchdog: Watchdog | None = None
        self._native_end: NativeEnd | None = None
        self.failure: FirstFailure | None = None
        """The first error of any rank. Set when all ranks have started."""
        self.mistake: RecipeError | None = None
        if timeouts is None:
            return
        world, mailbox = context.world, None
        if world.size > 1:
            mailbox = Mailbox(default_store(), f"lockstep/watch/{context.recorder.attempt}")
        self._watchdog = Watchdog(
            context.phases,
            timeouts,
            rank=world.rank,
            size=world.size,
            mailbox=mailbox,
            on_hang=self._on_hang,
            is_shutting_down=is_shutting_down,
            is_recovered=self._is_recovered,
            on_stuck=self._on_stuck,
            agreements=self._agreements,
            has_peer_failed=self._has_peer_failed,
        )
        if mailbox is not None and sys.platform == "linux" and context.device.type == "cpu":
            self._native_end = NativeEnd(self._watchdog.before_native_end)

    def _has_peer_failed(self) -> bool:
        return self.failure is not None and self.failure.cause(wait_seconds=0.0) is not None

    def _agreements(self) -> list[StepAgreement]:
        modules = () if self._run is None else self._run.training.modules
        return [module.agreement for module in list(modules)]

    def watch(self, run: Run) -> None:
        self._run = run

    @property
    def ends_the_process(self) -> bool:
        return self._watchdog is not None and self._watchdog.ends_the_process

    def close(self) -> None:
        if self._native_end is not None:
            self._native_end.close()
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.close()

    def _event(self, name: str, **details: Any) -> None:
        if self._run is not None:
            self._run.event(name, **details)
        else:
            self._context.recorder.event(name, 0, **details)

    def _is_recovered(self, hang: Hang) -> bool:
        return self._recovery is not None and self._recovery.can_replace and hang.kind == "missing"

    def _on_hang(
        self,
        hang: Hang,
        snapshots: Mapping[int, StackSnapshot],
        collected: bool,
        mine: StackSnapshot,
    ) -> None:
        if collected:
            path = self._context.run_dir / f"hang-{mine.step:08d}.txt"
            stacks = f"all stacks: {path}"
            try:
                path.write_text(page(hang, snapshots), encoding="utf-8")
            except OSError as failure:
                stacks = f"{cannot_write(path, failure)}; all stacks:\n\n{page(hang, snapshots)}"
            say(
                f"lockstep: the run hangs after step {mine.step}:"
                f" {hang.summary}\n{hang.report}\n{stacks}"
            )
        if self._context.world.rank == 0:
            self._event(
                "hang",
                kind=hang.kind,
                ranks=list(hang.ranks),
                summary=hang.summary,
                seconds=round(mine.seconds, 1),
            )
        if self._timeouts is None or self._timeouts.on_hang != "end":
            return
        error: LockstepError = HangError(hang.summary)
        status = HUNG_STATUS
        if hang.kind == "order":
            error = self.mistake = RecipeError(hang.summary)
            status = USER_ERROR_STATUS
            time.sleep(EXIT_DELAY_SECONDS)
            gloo_sockets.shut_down_gloo_sockets()
            if self._watchdog is not None and self._watchdog.wait_until_closed(ABORT_SECONDS):
                return  # the training thread has raised the error
            say(f"lockstep: RecipeError: {error}")
        elif self._recovery is not None and self._is_recovered(hang):
            if collected:
                self._recovery.rejoin.report_hang(
                    hang.ranks, failure_record(error, None, HUNG_STATUS)
                )
            return
        timer = threading.Timer(SAVING_SECONDS, os._exit, [status])
        timer.daemon = True
        timer.start()
        time.sleep(EXIT_DELAY_SECONDS)
        if mine.activity == "waits":  # otherwise the training thread may be changing the state
            self._save(error)
        write_failure(failure_record(error, None, status))
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)

    def _on_stuck(self) -> None:
        error = "a peer was lost: another process of this run ended, or the connection to it broke"
        self._event("run-failed", error=error)
        self._save(HangError("the run was ended while this process waited for another"))
        os._exit(128 + signal.SIGTERM)

    def _save(self, error: LockstepError) -> None:
        if self._run is not None:
            with defer_kill():
                self._rescue(self._run, error)


def page(hang: Hang, snapshots: Mapping[int, StackSnapshot]) -> str:
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), hang.summary, "", hang.report]
    for rank, each in sorted(snapshots.items()):
        head = f"rank {rank} ({each.host}, process {each.process}): {each.phase}, after step"
        lines += ["", f"{head} {each.step}, {each.seconds:.1f} s"]
        lines += [f"  in {call}, call {call.sequence} of {call.group}" for call in each.calls]
        for name, frames in {"training thread": each.stack, **each.threads}.items():
            lines += [f"  {name}, innermost frame last:", *(f"    {frame}" for frame in frames)]
    return "\n".join(lines) + "\n"
