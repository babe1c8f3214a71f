"""How the ranks of an examination agree and tell of one another: over the store alone, never by what is being examined.

[Note: the deadline] Before each probe a rank notes its name. A thread watches the time: where a probe does not end, the launcher ends this
rank, or any rank says that it gave up, it notes where its own main thread stands, waits a moment for the others' notes, writes down what
is known and ends the process. So a collective that hangs, or a rank that fails, does not hold the doctor up. A rank without a note does
not answer: it is stopped, dead or out of reach.
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
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lockstep.doctor.late import Note

_PREFIX = "lockstep-doctor"
_ALARM = "alarm"
_LOOK_SECONDS = 0.2
_NOTES_SECONDS = 2.0
"""How long the others' notes are waited for: less than the launcher waits after SIGTERM."""
_STORE_SECONDS = 3600
"""The store's own patience: longer than any deadline."""


class Board:
    """One rank's view. Used by one thread."""

    def __init__(self, rank: int, size: int, deadline_seconds: float, give_up: Callable[[list[Note]], None]) -> None:
        """`give_up` is given the notes of all ranks that answered, in a thread of its own, and must end the process."""
        self.rank = rank
        self.size = size
        self._deadline_seconds = deadline_seconds
        self._give_up = give_up
        self._store = _connect()
        self._exchanges = 0
        self._lock = threading.Lock()
        self._note = Note(rank=rank, index=0, probe="the start")
        self._until: float | None = None
        self._failed = threading.Event()
        self._ends = False
        self._main = threading.main_thread().ident
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for all threads: the watching one takes it
        threading.Thread(target=self._watch, args=(_connect(),), name="lockstep-doctor-deadline", daemon=True).start()

    @contextmanager
    def probe(self, name: str, deadline_seconds: float | None = None) -> Iterator[None]:
        """What all ranks do together: it ends in time, and without an exception, or the examination ends."""
        with self._lock:
            self._note = Note(rank=self.rank, index=self._note.index + 1, probe=name)
            self._until = time.monotonic() + (deadline_seconds or self._deadline_seconds)
        try:
            yield
        except Exception as error:
            self.tell(error)
            self._failed.set()
        with self._lock:
            self._until = None
            is_over = self._ends or self._failed.is_set()
        if is_over:  # what came of a probe since, as of a peer's end, is no finding
            time.sleep(_STORE_SECONDS)  # the watching thread ends the process

    def tell(self, error: Exception) -> None:
        """Note that this rank's part of the probe raised, whether or not the others' did."""
        text = (str(error).splitlines() or [""])[0]
        with self._lock:
            self._note = self._note.with_error(f"{type(error).__name__}: {text}")

    def everyone(self, value: Any) -> list[Any]:
        """Each rank's JSON value, in rank order. Every rank calls it. Rank 0 reads them all, the others what it made of them."""
        number, self._exchanges = self._exchanges, self._exchanges + 1
        self._store.set(f"{number}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            found = self._store.multi_get([f"{number}/{rank}" for rank in range(self.size)])
            self._store.set(f"{number}/all", f"[{','.join(each.decode() for each in found)}]")
        everyone: list[Any] = json.loads(self._store.get(f"{number}/all"))
        return everyone

    def together(self) -> None:
        """Go on when all are here. Every rank calls it."""
        self.everyone(None)

    def count(self, name: str, amount: int) -> int:
        """Add to a number that all ranks share, and return what it is then."""
        return int(self._store.add(f"count/{name}", amount))

    def _watch(self, store: Any) -> None:
        while True:
            is_ended = signal.sigtimedwait({signal.SIGTERM}, _LOOK_SECONDS) is not None
            with self._lock:
                is_late = self._until is not None and time.monotonic() > self._until
            if is_ended or is_late or self._failed.is_set() or _is_there(store, _ALARM):
                break
        with self._lock:
            self._ends = True
            mine = self._note.at(_place(sys._current_frames().get(self._main or 0)))
        notes = {self.rank: mine}
        with suppress(Exception):  # the store's machine may be what is gone
            store.set(f"note/{self.rank}", json.dumps(mine.as_json()))
            store.set(_ALARM, "")
            began = time.monotonic()
            while len(notes) < self.size and time.monotonic() - began < _NOTES_SECONDS:
                for rank in set(range(self.size)) - notes.keys():
                    if _is_there(store, f"note/{rank}"):
                        notes[rank] = Note.from_json(json.loads(store.get(f"note/{rank}")))
                time.sleep(_LOOK_SECONDS)
        self._give_up([notes[rank] for rank in sorted(notes)])


def _connect() -> Any:
    """The launcher's store. A connection for each thread: a call that waits holds it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(_PREFIX, TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS)))


def _is_there(store: Any, name: str) -> bool:
    try:
        return bool(store.check([name]))
    except Exception:  # the store is gone: its machine has ended, which its own deadline tells
        return False


def _place(frame: FrameType | None) -> str | None:
    """Where code that is neither torch's nor the doctor's stands: file, line, function. None: the innermost is of one of them."""
    if frame is None:
        return None
    file = frame.f_code.co_filename
    if f"{os.sep}torch{os.sep}" in file or os.path.dirname(file) == os.path.dirname(__file__) or file == _CONTEXTLIB:
        return None
    return f"{file}:{frame.f_lineno}, in {frame.f_code.co_name}"


_CONTEXTLIB = contextmanager.__code__.co_filename
