"""Failures of workers: the record that a failed worker writes, and the launcher's report. A worker
is the process of one rank."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.base.container import memory_limit_bytes
from lockstep.base.errors import (
    LockstepError,
    LossError,
    UserError,
    named,
    with_notes,
)
from lockstep.base.files import write_atomically
from lockstep.base.processes import shell_status
from lockstep.launch.termination import (
    HUNG_STATUS,
    INTERRUPTED_STATUS,
    PREEMPTED_STATUS,
    PREEMPTING,
)

# Errors that a healthy process gets after another process ended or failed. If any rank has an error
# of another kind, that error is reported as the cause of the run's failure.
_PEER_ERRORS = {
    "CollectivesAborted",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "PeerDied",
    "PeerStopped",
    "StageFailed",
    "ConnectionResetError",
    "ConnectionAbortedError",
    "BrokenPipeError",
}
_PEER_TEXT = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|Socket"
    r" closed|Timed out waiting \d+ms"
    r"|Application timeout caused pair closure|NCCL communicator was aborted|remote process"
    r" exited|failed to recv, got 0 bytes"
)

_MEMORY_ERRORS = {"MemoryError", "OutOfMemoryError"}
_MEMORY_TEXT = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA (driver )?error: out of"
    r" memory|Cuda failure 2 'out of memory'"
    r"|Failed to CUDA (calloc|host alloc)|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED"
)

_SIGNALS = {
    "SIGABRT": "native code gave up; what it printed stands above",
    "SIGBUS": "memory that could not be had; often /dev/shm is full",
    "SIGFPE": "an arithmetic fault in native code",
    "SIGILL": "a binary built for another processor",
    "SIGINT": "an interrupt from outside the run",
    "SIGKILL": "often the kernel or the container, because memory ran out",
    "SIGSEGV": "a crash in native code",
    "SIGTERM": "ended from outside the run",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRecord:
    time: float
    """Seconds since the epoch."""
    status: int
    kind: str
    message: str
    traceback: str
    """The traceback without the frames of lockstep's launcher. For a `LockstepError`, only the
    message."""
    user_error: bool
    peer_lost: bool
    """True if the exception, or an exception in its chain of causes, is a lost connection to
    another process."""

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> FailureRecord | None:
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    @property
    def title(self) -> str:
        name = self.kind.rpartition(":")[2]
        first = self.message.partition("\n")[0]
        return f"{name}: {first}"[:160] if first else name

    def is_like(self, other: FailureRecord | None) -> bool:
        return other is not None and (self.kind, self.message) == (other.kind, other.message)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailure:
    rank: int
    time: float
    """Seconds since the epoch, from the record. Without a record, the time at which the launcher
    noticed the end of the process."""
    returncode: int
    record: FailureRecord | None = None
    crash: str = ""
    """The Python stack at a fatal signal such as SIGSEGV. Empty without a fatal signal."""

    @property
    def status(self) -> int:
        if self.record is not None:
            return self.record.status
        return shell_status(self.returncode)

    @property
    def end(self) -> str:
        if self.record is not None or self.returncode >= 0:
            return f"failed (exit status {self.status})"
        name = _signal_name(-self.returncode)
        why = _SIGNALS.get(name, "")
        if name == "SIGKILL" and (limit := memory_limit_bytes()) is not None:
            why += f"; the control group's limit is {limit / 2**30:.3g} GiB"
        return f"was killed by {name} ({why})" if why else f"was killed by {name}"

    @property
    def lost_a_peer(self) -> bool:
        return self.record is not None and self.record.peer_lost

    @property
    def line(self) -> str:
        if self.lost_a_peer:
            return f"rank {self.rank} lost a peer"
        title = f": {self.record.title}" if self.record and self.record.traceback else ""
        return f"rank {self.rank} {self.end}{title}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    failures: Sequence[WorkerFailure] = ()
    stopped: Sequence[int] = ()
    finished: Sequence[int] = ()
    """Ranks that ended with exit status 0, without a signal of the launcher."""
    preempted: Sequence[int] = ()
    unkillable: Sequence[int] = ()
    """Ranks that are blocked in the kernel, and did not end in time after SIGKILL."""
    signal: int | None = None
    elsewhere: str = ""
    has_saved: bool = False
    options_read: bool = False
    new_run_dir: str = ""
    """The run directory that the launcher chose. The same command would choose a different
    directory."""

    @property
    def first(self) -> WorkerFailure | None:
        """The earliest failure, except errors about a lost peer. If all failures are about a lost
        peer, the earliest of them."""
        return min(self.failures, key=lambda f: (f.lost_a_peer, f.time, f.rank), default=None)

    @property
    def was_preempted(self) -> bool:
        """True if all workers have saved and ended on request. Also true if a signal came during a
        recovery, and one worker has saved the last step of the run."""
        if self.unkillable:
            return False
        if self.signal in PREEMPTING and self.has_saved:
            return all(failure.lost_a_peer or failure.record is None for failure in self.failures)
        return bool(self.preempted) and not (self.failures or self.stopped)

    @property
    def status(self) -> int:
        if self.was_preempted:
            return INTERRUPTED_STATUS if self.signal == signal.SIGINT else PREEMPTED_STATUS
        if self.signal is not None:
            return 128 + self.signal
        if self.first is None:
            return 1 if self.elsewhere else 0
        return self.first.status

    def report(self) -> str:
        if self.elsewhere and (self.first is None or self.first.lost_a_peer):
            return self.elsewhere
        return "\n".join(filter(None, (self.elsewhere, self._report())))

    def _report(self) -> str:
        if self.was_preempted:
            why = _signal_name(self.signal) if self.signal is not None else "it was asked to end"
            return f"saved and ended ({why}); the same command{self._run_dir} resumes from there"
        if self.signal is not None:
            left = self._remaining or "no worker is left"
            return f"stopped by {_signal_name(self.signal)}; {left}"
        first = self.first
        if first is None:
            return ""
        record = first.record
        if record is not None and record.user_error:
            return f"{record.kind.rpartition(':')[2]}: {record.message}"
        if record is not None and first.status == HUNG_STATUS:
            return f"{record.message}; ended with status {HUNG_STATUS}"
        head, count = f"rank {first.rank} {first.end}", len(self.failures)
        if count > 1:
            head += f", first of {count}"
        if first.lost_a_peer and self.finished:
            gone = f"{_ranks(self.finished)} ended with status 0 while others waited"
            head = f"{gone}; did the script leave its loop, or exit, there alone? {head}"
        body = (record.traceback if record is not None else first.crash).rstrip()
        others = "; ".join(self._later_failures(first))
        lines = (
            f"{head}:" if body else head,
            body,
            f"The others: {others}." if others else "",
            f"The last step is saved; the same command{self._run_dir} resumes from it."
            if self.has_saved
            else "",
        )
        return "\n".join(filter(None, lines))

    def _later_failures(self, first: WorkerFailure) -> Iterator[str]:
        later = sorted((f for f in self.failures if f is not first), key=lambda f: (f.time, f.rank))
        if lost := [failure.rank for failure in later if failure.lost_a_peer]:
            yield f"{_ranks(lost)} lost a peer"
        for failure in later:
            if not failure.lost_a_peer:
                title = failure.record.title if failure.record is not None else ""
                is_same = failure.record is not None and failure.record.is_like(first.record)
                detail = " with the same error" if is_same else f" with {title}" if title else ""
                yield f"rank {failure.rank} {failure.end} too{detail}"
        if self.stopped:
            yield f"{_ranks(self.stopped)} {'was' if len(self.stopped) == 1 else 'were'} stopped"
        if self.finished:
            yield f"{_ranks(self.finished)} had finished"
        if self._remaining:
            yield self._remaining

    @property
    def _remaining(self) -> str:
        if not self.unkillable:
            return ""
        return f"{_ranks(self.unkillable)} did not end, not even by SIGKILL: the kernel holds it"

    @property
    def _run_dir(self) -> str:
        if not self.new_run_dir:
            return ""
        shown = os.path.relpath(self.new_run_dir)
        path = self.new_run_dir if shown.startswith(os.pardir) else shown
        return f" with --run-dir {shlex.quote(path)} before the script"


def failure_record(
    error: BaseException, frames: TracebackType | None, status: int
) -> FailureRecord:
    kind = type(error)
    return FailureRecord(
        time=time.time(),
        status=status,
        kind=f"{kind.__module__}:{kind.__qualname__}",
        message=with_notes(error) if isinstance(error, UserError) else _text(error),
        traceback=named(error) + "\n"
        if isinstance(error, LockstepError)
        else "".join(traceback.TracebackException(kind, error, frames).format()),
        user_error=isinstance(error, UserError),
        peer_lost=lost_a_peer(error),
    )


def error_details(error: BaseException) -> dict[str, Any]:
    """Return the fields of the event `run-failed`. The fields are `error`, `detail` (torch's text)
    after the loss of a peer, and `not_finite_in` (the step) after a loss or gradient that was not
    finite."""
    text = f"{type(error).__name__}: {_text(error)}"
    if lost_a_peer(error) and not isinstance(error, LockstepError):
        return {
            "error": (
                "a peer was lost: another process of this run ended, or the connection to it broke"
            ),
            "detail": text,
        }
    if isinstance(error, LossError) and error.not_finite_in is not None:
        return {"error": text, "not_finite_in": error.not_finite_in}
    return {"error": text}


def lost_a_peer(error: BaseException) -> bool:
    return any(_is_one_of(link, _PEER_ERRORS, _PEER_TEXT) for link in chain(error))


def out_of_memory(error: BaseException) -> bool:
    return any(_is_one_of(link, _MEMORY_ERRORS, _MEMORY_TEXT) for link in chain(error))


def read_crash(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    ours = (
        os.path.join("lockstep", "launch", "worker.py"),
        "<frozen runpy>",
        "Extension modules: ",
    )
    return "\n".join(line for line in lines if not any(text in line for text in ours)).strip()


def read_torch_record(path: Path, returncode: int) -> FailureRecord | None:
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        extra = message["extraInfo"]
        return FailureRecord(
            time=os.stat(path).st_mtime,
            status=shell_status(returncode),
            kind=f":{message['message'].partition(':')[0]}",
            message=message["message"].partition(": ")[2],
            traceback=extra["py_callstack"],
            user_error=False,
            peer_lost=_PEER_TEXT.search(message["message"]) is not None,
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_one_of(error: BaseException, names: Collection[str], text: re.Pattern[str]) -> bool:
    if any(kind.__name__ in names for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and text.search(_text(error)) is not None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's __str__ may fail
        return f"<{type(error).__name__} whose text cannot be had>"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ranks(ranks: Sequence[int]) -> str:
    parts: list[str] = []
    for _, group in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        parts.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(parts)}"
