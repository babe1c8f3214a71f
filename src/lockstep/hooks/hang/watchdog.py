"""The thread of each rank that asks, where its own stands still for too long, where all ranks stand.

[Note: rounds] A rank that is late asks: the first to write the round's key gathers what all others, who look for that key, answer. It
judges, and writes the verdict for all. A rank that was itself held up finds the verdict of a round that is over, and goes on to the next.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from lockstep.hooks.hang.native_stacks import Stacks, read
from lockstep.hooks.hang.report import Hang, judged
from lockstep.hooks.hang.snapshot import Place, line_of, look
from lockstep.logging.phases import Phases
from lockstep.options import WatchdogTimeouts

TICK_SECONDS = 0.2
ANSWER_SECONDS = 1.2
"""From a question to the last answer that is waited for."""
SILENCE_SECONDS = 10.0
"""Seconds without a message after which a rank counts as silent, as one in native code that holds the GIL."""
STUCK_SECONDS = 1.0
"""From the end of a run to that of a rank whose waits are not broken by it."""
AGAIN_SECONDS = 2.0
"""From a verdict that nobody is late to the next question of this rank."""


class Mailbox(Protocol):
    """A store that all ranks read and write. All methods raise `DistError` or `RuntimeError` if it cannot be reached."""

    def put(self, key: str, text: str) -> None: ...
    def take(self, key: str) -> str | None:
        """None where there is none."""
        ...

    def first(self, key: str, text: str) -> bool:
        """Write the text if the key has none yet. Returns True if it was written."""
        ...


class StoreMailbox:
    """In torch's store, by a connection of its own: others' waits do not hold it up."""

    def __init__(self, store: Any, prefix: str) -> None:
        mine = store.clone()
        mine.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        self._store = dist.PrefixStore(prefix, mine)  # type: ignore[attr-defined]

    def put(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def take(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        found: bytes = self._store.get(key)
        return found.decode()

    def first(self, key: str, text: str) -> bool:
        found: bytes = self._store.compare_set(key, "", text)
        return found.decode() == text


class Watchdog:
    """The watchdog of one rank. Every rank makes one, in its training thread."""

    def __init__(
        self,
        phases: Phases,
        timeouts: WatchdogTimeouts,
        *,
        rank: int,
        size: int,
        mailbox: Mailbox | None,
        told: Callable[[Hang, Mapping[int, Place], bool, Place], None],
        is_over: Callable[[], bool],
        ended: Callable[[], None],
    ) -> None:
        """`mailbox`: None with one process. `is_over`: whether the launcher is ending the run. `ended`: called where it is, and this rank
        waits for what will not come. `told`: called in the watchdog's thread on every rank that found a hang out: the hang, all
        places, whether this rank is the one that gathered them, and its own place."""
        self._phases = phases
        self._timeouts = timeouts
        self._rank = rank
        self._size = size
        self._mailbox = mailbox
        self._told = told
        self._is_over = is_over
        self._ended = ended
        self._over_since: float | None = None
        self._trains = threading.current_thread()
        self._over = threading.Event()
        self.has_ended_the_run = False
        """True if the watchdog's thread ends this process, whatever its main thread does."""
        self._round = 0
        self._not_before = 0.0
        self._reported_since: float | None = None
        self._silent_since: dict[int, float] = {}
        self._stacks = Stacks()
        self._thread = threading.Thread(target=self._run, name="lockstep-watchdog", daemon=True)

    def start(self) -> None:
        if self._mailbox is not None:
            who = {"host": socket.gethostname(), "process": os.getpid(), "stacks": self._stacks.descriptor}
            self._mailbox.put(f"who/{self._rank}", json.dumps(who))
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._stacks.close()

    def _run(self) -> None:
        while not self._over.wait(TICK_SECONDS):
            if self._is_over() and self._is_stuck():
                self.has_ended_the_run = True
                self._ended()
            try:
                if self._is_to_ask() or self._is_asked():
                    self._take_part()
            except (dist.DistError, RuntimeError):  # the store is gone, or cannot be reached
                self._tell_alone()

    def _is_stuck(self) -> bool:
        """True if this rank still waits for another some time after the run has ended."""
        self._over_since = self._over_since or time.monotonic()
        return time.monotonic() - self._over_since >= STUCK_SECONDS and self._place().doing == "waits"

    def _limit_seconds(self) -> float:
        return self._timeouts.limit_seconds(self._phases.name, self._phases.usual(self._phases.name))

    def _is_to_ask(self) -> bool:
        is_late = self._phases.seconds >= self._limit_seconds()
        return is_late and time.monotonic() >= self._not_before and self._reported_since != self._phases.since

    def _is_asked(self) -> bool:
        return self._mailbox is not None and self._mailbox.take(f"{self._round}/asked") is not None

    def _place(self) -> Place:
        phases = self._phases
        place = look(
            self._rank,
            self._trains,
            phase=phases.name,
            step=phases.step,
            seconds=phases.seconds,
            limit_seconds=self._limit_seconds(),
            is_first=self._timeouts.fixed_seconds is None and phases.usual(phases.name) is None,
        )
        return replace(place, children=self._stacks.of_children()) if place.is_late and place.doing != "waits" else place

    def _take_part(self) -> None:
        """[Note: rounds]"""
        number = self._round
        if self._mailbox is None:
            place = self._place()
            self._conclude(judged({self._rank: place}, {}), {self._rank: place}, place, gathered=True)
            return
        gathers = self._mailbox.first(f"{number}/asked", str(self._rank))
        place = self._place()
        self._mailbox.put(f"{number}/{self._rank}", json.dumps(place.say()))
        deadline = time.monotonic() + (ANSWER_SECONDS if gathers else 3 * ANSWER_SECONDS)
        if gathers:
            places = {self._rank: place} | self._gathered(number, deadline)
            hang = judged(places, self._silent(places))
            self._mailbox.put(f"{number}/verdict", json.dumps(None if hang is None else asdict(hang)))
            self._round += 1
            self._conclude(hang, places, place, gathered=True)
            return
        while (said := self._mailbox.take(f"{number}/verdict")) is None and time.monotonic() < deadline:
            if self._over.wait(TICK_SECONDS / 4):
                return
        self._round += 1
        found = None if said is None else json.loads(said)
        self._conclude(None if found is None else Hang(**{**found, "ranks": tuple(found["ranks"])}), {}, place, gathered=False)

    def _gathered(self, number: int, deadline: float) -> dict[int, Place]:
        assert self._mailbox is not None
        missing, places = set(range(self._size)) - {self._rank}, dict[int, Place]()
        while missing and time.monotonic() < deadline:
            for rank in list(missing):
                if (said := self._mailbox.take(f"{number}/{rank}")) is not None:
                    places[rank] = Place.read(json.loads(said))
                    missing.discard(rank)
            if missing and self._over.wait(TICK_SECONDS / 4):
                break
        return places

    def _silent(self, places: Mapping[int, Place]) -> dict[int, str]:
        """The ranks that did not answer, where that is conclusive, with the reason in words."""
        assert self._mailbox is not None
        now, found = time.monotonic(), {}
        for rank in range(self._size):
            if rank in places:
                self._silent_since.pop(rank, None)
                continue
            since = self._silent_since.setdefault(rank, now - ANSWER_SECONDS)
            said = self._mailbox.take(f"who/{rank}")
            who = None if said is None else json.loads(said)
            reason, is_certain = _reason(who)
            if is_certain or now - since >= SILENCE_SECONDS:
                found[rank] = reason
        return found

    def _conclude(self, hang: Hang | None, places: Mapping[int, Place], mine: Place, *, gathered: bool) -> None:
        if hang is None:
            self._not_before = time.monotonic() + AGAIN_SECONDS
            return
        self._reported_since = self._phases.since
        self.has_ended_the_run = self._timeouts.on_hang == "end"
        self._told(hang, places, gathered, mine)

    def _tell_alone(self) -> None:
        """Report this rank's own snapshot, because the others cannot be asked."""
        if not self._is_to_ask():
            return
        place = self._place()
        reason = "the store that all ranks meet at does not answer: its process has ended, or the way to it is cut"
        self._conclude(judged({self._rank: place}, dict.fromkeys(set(range(self._size)) - {self._rank}, reason)), {}, place, gathered=True)


def _reason(who: Mapping[str, Any] | None) -> tuple[str, bool]:
    """Why a process does not answer, in words, and whether that is certain. `who`: what it said of itself at its start."""
    if who is None:
        return "it has not come to the beginning of its run", False
    name = f"process {who['process']} on {who['host']}"
    if who["host"] != socket.gethostname():
        return f"{name} does not answer: it has ended, it is stopped, or its machine cannot be reached", False
    try:
        state = Path(f"/proc/{who['process']}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return f"{name} has ended", True
    if state == "T":
        return f"{name} is stopped (by SIGSTOP, or a debugger); kill -CONT {who['process']} lets it go on", True
    if state in "ZX":
        return f"{name} has ended", True
    line = line_of(read(who["process"], who["stacks"]))
    return f"{name} does not answer: native code holds Python's lock" + (f", called at {line}" if line else ""), False
