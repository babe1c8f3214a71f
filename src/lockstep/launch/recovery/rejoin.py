"""Recovery in place, in a worker. When another worker is lost, this worker leaves its collectives,
waits for its new rank, and continues training."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from lockstep.base.errors import UserError
from lockstep.launch.failures import FailureRecord, chain, failure_record, lost_a_peer
from lockstep.launch.recovery.channel import ENDED, Channel
from lockstep.launch.worker_files import write_failure

STUCK_SECONDS = 2.0
"""Time after which this process ends if a collective does not return after its abort."""
NOTICE_SECONDS = 15.0
"""Longest time between an error caused by a lost peer and the launcher's message about the loss.
Launchers notice the loss of a machine only by missing heartbeats."""


class Rejoin:
    """Recovery in place on the side of the worker. Created once, in the training thread."""

    def __init__(
        self, channel: Channel, abort: Callable[[], None], waits: Callable[[], object]
    ) -> None:
        self.is_rejoining = _is_replacement
        self.trainings = 0
        self.lost_at = self.rejoined_at = 0.0
        """The times at which the launcher detected the latest loss, and at which this process got
        its new rank, in seconds since 1970."""
        self.images: list[int] = []
        """Descriptors of the shared memory with the copies of the training state that all processes
        made before the loss."""
        self._script_seconds = time.monotonic() - _script_began
        self._channel = channel
        self._abort = abort
        self._waits_for = waits
        self._has_left = threading.Event()
        self._is_new = _is_replacement
        self._verdicts: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._is_lost = threading.Event()
        self._handled: BaseException | None = None
        self._refused: BaseException | None = None
        self._listener = threading.Thread(
            target=self._listen, name="lockstep-recovery", daemon=True
        )
        self._listener.start()

    def announce(self, why_not: str | None, sizes: Sequence[int] = ()) -> None:
        self._channel.send(
            "able", why_not=why_not, sizes=list(sizes), script_seconds=self._script_seconds
        )

    def report_hang(self, ranks: Sequence[int], record: FailureRecord) -> None:
        self._channel.send("hangs", ranks=list(ranks), record=asdict(record))

    def offer_images(self, descriptors: Sequence[int]) -> None:
        """Pass the launcher the descriptors of shared memory with copies of training states. This
        process keeps the copies of its own state and of other ranks' states."""
        self._channel.send("images", descriptors)

    def note_all_offered(self) -> None:
        self._channel.send("all-offered")

    def drop_images(self) -> None:
        for descriptor in self.images:
            os.close(descriptor)
        self.images = []

    def join_at_first(self) -> None:
        """In a process that replaces a lost worker, wait until the run includes the process. Ends
        the process if the run does not need a replacement."""
        if self._is_new:
            self._is_new = False
            if not self._wait_for_verdict(-1):
                sys.stdout.flush()
                sys.stderr.flush()
                # the exit status of a process that the launcher stops
                os._exit(128 + signal.SIGTERM)

    def rejoined(
        self, error: BaseException, hold: Callable[[], int | str], *, at: int = -1
    ) -> bool:
        """Return True if `error` came from the loss of another worker, and this process has a new
        rank in the environment. Called in the training thread. A second call with the same `error`
        returns the same result. `hold` keeps this process's state in memory, and returns the number
        of steps (-1 without a state) or the reason why this process cannot recover."""
        if any(link is self._handled for link in chain(error)):
            return True
        if any(link is self._refused for link in chain(error)):
            return False
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return False
        is_lost = lost_a_peer(error)
        if not self._is_lost.wait(NOTICE_SECONDS if is_lost else 0.0) or not (
            is_lost or isinstance(error, RuntimeError | OSError)
        ):
            return False
        self.is_rejoining = True
        held = hold()
        if isinstance(held, str):
            self.refuse(held)
        if isinstance(held, str) or not self._wait_for_verdict(held, at):
            self._refused = error
            return False
        self._handled = error
        return True

    def refuse(self, why_not: str) -> None:
        self._channel.send("refuses", why_not=why_not)

    def raise_if_lost(self) -> None:
        if self._is_lost.is_set():
            raise ConnectionAbortedError("another process was lost, or joins")

    def leave(self, leave_groups: Callable[[], object]) -> None:
        """Leave the process groups in which a process was lost. A message about another loss that
        arrives during the call applies to the new groups."""
        leave_groups()
        if self._is_lost.is_set():
            self._abort()

    def close(self, *, failed: bool) -> None:
        self._has_left.set()
        self.announce("its training has failed" if failed else ENDED)

    def end_recovery(self) -> None:
        self.is_rejoining = False
        self._handled = None
        self.drop_images()

    def _wait_for_verdict(self, step: int, at: int = -1) -> bool:
        self._has_left.set()
        self._channel.send("ready", step=step, at=at)
        verdict = self._verdicts.get()
        if verdict is None or verdict["kind"] != "rejoin":
            return False
        os.environ.update(verdict["environment"])
        self.lost_at, self.rejoined_at = verdict["lost_at"], time.time()
        self.drop_images()
        self.images = verdict["descriptors"]
        return True

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            if message["kind"] != "lost":
                self._is_lost.clear()
                self._verdicts.put(message)
                continue
            self._has_left.clear()
            self._is_lost.set()
            self._abort()
            threading.Thread(
                target=self._end_if_stuck, name="lockstep-recovery-limit", daemon=True
            ).start()
        self._verdicts.put(None)

    def _end_if_stuck(self) -> None:
        """End this process if its main thread stays in an aborted collective. Gloo occasionally
        loses a wake-up."""
        waited_for = self._waits_for()
        while not self._has_left.wait(STUCK_SECONDS):
            before, waited_for = waited_for, self._waits_for()
            if waited_for is not None and waited_for == before:
                error = ConnectionAbortedError(
                    f"the wait for other processes did not end after the loss of one: {waited_for}"
                )
                write_failure(failure_record(error, None, 1))
                os._exit(1)


_channel: Channel | None = None
_script_began = time.monotonic()
_is_replacement = False
_session_was_opened = False
_rejoin: Rejoin | None = None


def use_channel(channel: Channel | None, *, is_replacement: bool) -> None:
    global _channel, _script_began, _is_replacement
    _channel, _script_began, _is_replacement = channel, time.monotonic(), is_replacement


def refuse_recovery(why_not: str) -> None:
    global _session_was_opened
    _session_was_opened = True
    if _channel is not None and _rejoin is None:
        _channel.send("able", why_not=why_not, sizes=[], script_seconds=0.0)


def session_was_opened() -> bool:
    return _session_was_opened


def connect(abort: Callable[[], None], waits: Callable[[], object]) -> Rejoin | None:
    global _rejoin
    if _rejoin is None and _channel is not None:
        _rejoin = Rejoin(_channel, abort, waits)
    return _rejoin
