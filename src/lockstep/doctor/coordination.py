"""Coordinates the doctor's ranks through torch's store, because the collectives under test may not
work.

A probe is a step that all ranks take together. A thread of each rank watches the probe, and gives
up if the probe fails or passes its deadline, if the launcher sends SIGTERM, or if another rank has
given up. A thread that gives up publishes the status of its rank, collects the statuses of the
other ranks, writes the results so far and ends the process. A collective that hangs does not block
the doctor. A rank without a status is stopped, dead, or unreachable.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lockstep.doctor.summary import RankStatus

_PREFIX = "lockstep-doctor"
_ABORT_KEY = "abort"
_POLL_SECONDS = 0.2
_STATUS_WAIT_SECONDS = 2.0
_STORE_TIMEOUT_SECONDS = 3600
"""Timeout of the store, longer than all deadlines of probes."""


class ProbeCoordinator:
    """Provides barriers, exchanges of JSON and deadlines, through torch's store."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        deadline_seconds: float,
        on_abort: Callable[[list[RankStatus]], None],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._deadline_seconds = deadline_seconds
        self._on_abort = on_abort
        self._store = _connect()
        self._exchanges = 0
        self._lock = threading.Lock()
        self._status = RankStatus(rank=rank, index=0, probe="the start")
        self._deadline: float | None = None
        self._failed = threading.Event()
        self._aborting = False
        self._main_thread = threading.main_thread().ident
        # blocked in all threads: the watching thread waits for the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(
            target=self._watch, args=(_connect(),), name="lockstep-doctor-deadline", daemon=True
        ).start()

    @contextmanager
    def probe(self, name: str, deadline_seconds: float | None = None) -> Iterator[None]:
        """Run a step that all ranks take together. If the step fails on a rank or passes its
        deadline, all ranks end."""
        with self._lock:
            self._status = RankStatus(rank=self.rank, index=self._status.index + 1, probe=name)
            self._deadline = time.monotonic() + (deadline_seconds or self._deadline_seconds)
        try:
            yield
        except Exception as error:
            self.record_error(error)
            self._failed.set()
        with self._lock:
            self._deadline = None
            is_over = self._aborting or self._failed.is_set()
        # results after another rank has ended may be caused by that, so none is reported
        if is_over:
            time.sleep(_STORE_TIMEOUT_SECONDS)  # the watching thread ends the process

    def record_error(self, error: Exception) -> None:
        text = (str(error).splitlines() or [""])[0]
        with self._lock:
            self._status = replace(self._status, error=f"{type(error).__name__}: {text}")

    def all_gather(self, value: Any) -> list[Any]:
        """Gather JSON values from all ranks. All ranks must call this method."""
        number, self._exchanges = self._exchanges, self._exchanges + 1
        self._store.set(f"{number}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            values = self._store.multi_get([f"{number}/{rank}" for rank in range(self.world_size)])
            self._store.set(f"{number}/all", f"[{','.join(each.decode() for each in values)}]")
        gathered: list[Any] = json.loads(self._store.get(f"{number}/all"))
        return gathered

    def barrier(self) -> None:
        self.all_gather(None)

    def add_to_counter(self, name: str, amount: int) -> int:
        return int(self._store.add(f"count/{name}", amount))

    def _watch(self, store: Any) -> None:
        while True:
            is_terminated = signal.sigtimedwait({signal.SIGTERM}, _POLL_SECONDS) is not None
            with self._lock:
                is_late = self._deadline is not None and time.monotonic() > self._deadline
            if is_terminated or is_late or self._failed.is_set() or _has_key(store, _ABORT_KEY):
                break
        with self._lock:
            self._aborting = True
            own = replace(
                self._status, location=_location(sys._current_frames().get(self._main_thread or 0))
            )
        statuses = {self.rank: own}
        with suppress(Exception):  # the machine that hosts the store may be down
            store.set(f"status/{self.rank}", json.dumps(asdict(own)))
            store.set(_ABORT_KEY, "")
            began = time.monotonic()
            while (
                len(statuses) < self.world_size and time.monotonic() - began < _STATUS_WAIT_SECONDS
            ):
                for rank in set(range(self.world_size)) - statuses.keys():
                    if _has_key(store, f"status/{rank}"):
                        statuses[rank] = RankStatus(**json.loads(store.get(f"status/{rank}")))
                time.sleep(_POLL_SECONDS)
        self._on_abort([statuses[rank] for rank in sorted(statuses)])


def _connect() -> Any:
    """Connect a thread to the store. A call that waits would block a connection shared by several
    threads."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(
        _PREFIX,
        TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_TIMEOUT_SECONDS)),
    )


def _has_key(store: Any, name: str) -> bool:
    try:
        return bool(store.check([name]))
    # the machine that hosts the store has ended: this rank reports it when its probe passes the
    # deadline
    except Exception:
        return False


def _location(frame: FrameType | None) -> str | None:
    if frame is None:
        return None
    file = frame.f_code.co_filename
    if (
        f"{os.sep}torch{os.sep}" in file
        or os.path.dirname(file) == os.path.dirname(__file__)
        or file == _CONTEXTLIB
    ):
        return None
    return f"{file}:{frame.f_lineno}, in {frame.f_code.co_name}"


_CONTEXTLIB = contextmanager.__code__.co_filename
