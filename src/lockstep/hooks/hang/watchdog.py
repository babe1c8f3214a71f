"""The watchdog of each rank: if the training thread exceeds a timeout, it collects all ranks' stack
snapshots.

[Note: rounds] The first late rank to write the round's key collects the snapshots that the others,
who poll that key, write. It writes the diagnosis for all. A rank that comes late reads it, and goes
on to the next round.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.base.container import process_id_space
from lockstep.base.torch_private import clone_store
from lockstep.comm import gloo_sockets
from lockstep.hooks.hang.report import Hang, diagnose
from lockstep.hooks.hang.snapshot import (
    StackSnapshot,
    StackWriter,
    innermost_line,
    read_stack,
    take_snapshot,
)
from lockstep.logging.phases import Phases
from lockstep.options import WatchdogTimeouts

TICK_SECONDS = 0.2
ANSWER_SECONDS = 1.2  # A rank that asks for snapshots waits this long for the answers
SILENCE_SECONDS = 10.0
"""A rank that is silent for so long counts as hanging."""
# when the run ends, a rank that still waits for another after this time is ended by its watchdog
STUCK_SECONDS = 1.0
# after a diagnosis that no rank is late, this rank waits so long before it asks again
AGAIN_SECONDS = 2.0


class Mailbox:
    """Texts in torch's store. Without the store all methods raise `DistError` or `RuntimeError`."""

    def __init__(self, store: Any, prefix: str) -> None:
        # Of its own, so that it need not wait until other threads' requests are answered, and can
        # be ended.
        connection, self._socket = (
            gloo_sockets.with_own_connection(store)
            if sys.platform == "linux"
            else (clone_store(store), None)
        )
        connection.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        self._store = dist.PrefixStore(prefix, connection)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End another thread's request: the store's host may be gone."""
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
        """Write the text unless the key has one. Returns True if it was written."""
        found: bytes = self._store.compare_set(key, "", text)
        return found.decode() == text


@dataclass(slots=True, eq=False)
class Watchdog:
    """Watches the thread that makes it. Every rank makes one."""

    phases: Phases
    timeouts: WatchdogTimeouts
    rank: int
    size: int
    mailbox: Mailbox | None  # None with one process
    on_hang: Callable[[Hang, Mapping[int, StackSnapshot], bool, StackSnapshot], None]
    """Called in the watchdog's thread on every rank that learns of a hang: the hang, all snapshots
    (empty unless this rank collected them), whether it did, and its own snapshot."""
    is_shutting_down: Callable[[], bool]  # True if the launcher is ending the run
    is_recovered: Callable[[Hang], bool]
    """True if the launcher replaces the hanging ranks, and no other ends."""
    on_stuck: Callable[[], None]  # called in the watchdog's thread if this rank still waits then
    # True if the watchdog's thread is about to end this process; then nothing else may
    ends_the_process: bool = False
    _shutting_down_since: float | None = None
    _training_thread: threading.Thread = field(default_factory=threading.current_thread)
    _closed: threading.Event = field(default_factory=threading.Event)
    _is_cut_off: bool = False
    _round: int = 0
    _not_before: float = 0.0
    _reported_since: float | None = None
    _silent_since: dict[int, float] = field(default_factory=dict)
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
            try:
                if not self._is_cut_off:
                    if self._must_ask() or (
                        self.mailbox is not None
                        and self.mailbox.take(f"{self._round}/asked") is not None
                    ):
                        self._take_part()
                    continue
            # the store is gone, or cannot be reached
            except (dist.DistError, RuntimeError) as error:
                # torch does not connect again, and logs each try
                self._is_cut_off = isinstance(error, dist.DistNetworkError)
            if not self._closed.is_set() and self._must_ask():
                self._report_alone()

    def _is_stuck(self) -> bool:
        """True if this rank waits for another some time after the run began to end."""
        self._shutting_down_since = self._shutting_down_since or time.monotonic()
        return (
            time.monotonic() - self._shutting_down_since >= STUCK_SECONDS
            and self._snapshot().activity == "waits"
        )

    def _limit_seconds(self) -> float:
        return self.timeouts.limit_seconds(self.phases.name, self.phases.usual(self.phases.name))

    def _must_ask(self) -> bool:
        is_late = self.phases.seconds >= self._limit_seconds()
        return (
            is_late
            and time.monotonic() >= self._not_before
            and self._reported_since != self.phases.since
        )

    def _snapshot(self) -> StackSnapshot:
        is_first = (
            self.timeouts.fixed_seconds is None and self.phases.usual(self.phases.name) is None
        )
        mine = take_snapshot(
            self.rank,
            self._training_thread,
            self.phases,
            limit_seconds=self._limit_seconds(),
            is_first=is_first,
        )
        return (
            replace(mine, children=self._stacks.of_children())
            if mine.is_late and mine.activity != "waits"
            else mine
        )

    def _take_part(self) -> None:
        """[Note: rounds]"""
        number = self._round
        if self.mailbox is None:
            mine = self._snapshot()
            self._conclude(diagnose({self.rank: mine}, {}), {self.rank: mine}, mine, collected=True)
            return
        collects = self.mailbox.put_if_new(f"{number}/asked", str(self.rank))
        mine = self._snapshot()
        self.mailbox.put(f"{number}/{self.rank}", json.dumps(asdict(mine)))
        deadline = time.monotonic() + (ANSWER_SECONDS if collects else 3 * ANSWER_SECONDS)
        if collects:
            snapshots = {self.rank: mine} | self._collect(number, deadline)
            hang = diagnose(snapshots, self._silent(snapshots))
            self.mailbox.put(
                f"{number}/diagnosis", json.dumps(None if hang is None else asdict(hang))
            )
            self._round += 1
            self._conclude(hang, snapshots, mine, collected=True)
            return
        while (
            text := self.mailbox.take(f"{number}/diagnosis")
        ) is None and time.monotonic() < deadline:
            if self._closed.wait(TICK_SECONDS / 4):
                return
        self._round += 1
        found = None if text is None else json.loads(text)
        self._conclude(
            None if found is None else Hang(**{**found, "ranks": tuple(found["ranks"])}),
            {},
            mine,
            collected=False,
        )

    def _collect(self, number: int, deadline: float) -> dict[int, StackSnapshot]:
        assert self.mailbox is not None
        missing, snapshots = set(range(self.size)) - {self.rank}, dict[int, StackSnapshot]()
        while missing and time.monotonic() < deadline:
            for rank in list(missing):
                if (text := self.mailbox.take(f"{number}/{rank}")) is not None:
                    snapshots[rank] = StackSnapshot.from_json(json.loads(text))
                    missing.discard(rank)
            if missing and self._closed.wait(TICK_SECONDS / 4):
                break
        return snapshots

    def _silent(self, snapshots: Mapping[int, StackSnapshot]) -> dict[int, str]:
        """Return the ranks that surely will not answer, and why."""
        assert self.mailbox is not None
        now, found = time.monotonic(), {}
        for rank in range(self.size):
            if rank in snapshots:
                self._silent_since.pop(rank, None)
                continue
            since = self._silent_since.setdefault(rank, now - ANSWER_SECONDS)
            text = self.mailbox.take(f"who/{rank}")
            reason, is_certain = _why_silent(None if text is None else json.loads(text))
            if is_certain or now - since >= SILENCE_SECONDS:
                found[rank] = reason
        return found

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
        self.ends_the_process = self.timeouts.on_hang == "end" and not self.is_recovered(hang)
        self.on_hang(hang, snapshots, collected, mine)

    def _report_alone(self) -> None:
        """Report this rank's snapshot: the others cannot be asked."""
        mine = self._snapshot()
        reason = (
            "torch's store does not answer: its process has ended, or the network to it is broken"
        )
        others = dict.fromkeys(set(range(self.size)) - {self.rank}, reason)
        self._conclude(diagnose({self.rank: mine}, others), {}, mine, collected=True)


def _why_silent(who: Mapping[str, Any] | None) -> tuple[str, bool]:
    """Say why a process does not answer, and whether that is certain. `who`: what it wrote at its
    start."""
    if who is None:
        return "it has not started its watchdog yet", False
    name = f"process {who['process']} on {who['host']}"
    if who["process_ids"] != process_id_space():
        return (
            (
                f"{name} does not answer: it has ended, it is stopped, or its machine cannot be"
                " reached"
            ),
            False,
        )
    if sys.platform != "linux":
        return (
            f"{name} does not answer: it has ended, it is stopped, or native code holds the GIL",
            False,
        )
    try:
        state = (
            Path(f"/proc/{who['process']}/stat")
            .read_text(encoding="ascii")
            .rpartition(")")[2]
            .split()[0]
        )
    except OSError:
        return f"{name} has ended", True
    if state == "T":
        return (
            (
                f"{name} is stopped (by SIGSTOP, or a debugger); kill -CONT {who['process']}"
                " resumes it"
            ),
            True,
        )
    if state in "ZX":
        return f"{name} has ended", True
    line = innermost_line(read_stack(who["process"], who["stacks"]))
    return (
        f"{name} does not answer: native code holds the GIL"
        + (f", called at {line}" if line else ""),
        False,
    )
