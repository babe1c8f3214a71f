"""Writes the record of one process: JSON lines, each written at once, because a process may end at
any moment."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeVar

from lockstep.audit.request import AuditRequest
from lockstep.evidence.rows import RowFile

_HERE = str(Path(__file__).resolve().parent)
_LIBRARIES = tuple(
    {
        os.path.realpath(path)
        for path in (os.path.dirname(os.__file__), sys.prefix + "/lib", sys.base_prefix + "/lib")
    }
)

Function = TypeVar("Function", bound=Callable[..., Any])


class RecordWriter:
    """The record of this process. Made once; a forked child goes on with a file of its own."""

    def __init__(self, request: AuditRequest) -> None:
        self.request = request
        self.is_suspended = False
        """True while the audit itself runs an optimizer: probes must not see it."""
        self._file: RowFile | None = None
        self._problems: set[str] = set()
        self._is_users: dict[str, bool] = {}
        self._stacks = self._open_stacks()
        os.register_at_fork(after_in_child=self._after_fork)

    def write(self, kind: str, **row: Any) -> None:
        if self._file is None:
            self._file = RowFile(self.request.folder / f"process-{os.getpid()}.jsonl")
            self.write(
                "process",
                pid=os.getpid(),
                parent=os.getppid(),
                rank=os.environ.get("RANK"),
                argv=sys.argv,
            )
        self._file.write(kind, **row)

    def problem(self, where: str) -> None:
        """Note an error of a probe, once each. The script must not suffer from it."""
        if where not in self._problems:
            self._problems.add(where)
            self.write("problem", where=where, text=traceback.format_exc(limit=-4))

    def line(self, *, caller_of_forward: bool = False) -> str:
        """Return the innermost line of the user's code that is being run, as path:number; empty if
        there is none.

        `caller_of_forward`: the line that called the model rather than one in its `forward`.
        """
        frame: FrameType | None = sys._getframe(1)
        found = ""
        while frame is not None:
            if self.is_users_file(frame.f_code.co_filename):
                found = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                if not (caller_of_forward and _is_forward(frame)):
                    return found
            frame = frame.f_back
        return found

    def is_users_file(self, name: str) -> bool:
        """True if a file is part of the audited script, and not of Python or a library."""
        if name not in self._is_users:
            path = os.path.realpath(name)
            inside = any(path.startswith(root.rstrip("/") + "/") for root in self.request.roots)
            library = (
                "site-packages" in path
                or path.startswith(_HERE)
                or (path.startswith(_LIBRARIES) and not inside)
            )
            self._is_users[name] = inside and not library and not name.startswith("<")
        return self._is_users[name]

    def flush_and_end(self, reason: str) -> None:
        """End this process at once: other ranks are at the same place, and the script must not go
        on."""
        self.write("end", reason=reason)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # nobody reads it any more
                stream.flush()
        _end_children()
        os._exit(0)

    def _after_fork(self) -> None:
        self._file = None
        self._problems = set()
        self._stacks = self._open_stacks()

    def _open_stacks(self) -> TextIO:
        """On SIGUSR2 this process writes the stacks of all its threads."""
        file = (self.request.folder / f"stacks-{os.getpid()}.txt").open("w", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        return file


def _is_forward(frame: FrameType) -> bool:
    return frame.f_code.co_name in ("forward", "_forward", "__call__") or hasattr(
        frame.f_locals.get("self"), "named_parameters"
    )


def _end_children() -> None:
    if "multiprocessing" in sys.modules:
        for child in sys.modules["multiprocessing"].active_children():
            child.kill()


def guarded(recorder: RecordWriter, function: Function) -> Function:
    """Return `function` with its exceptions noted, not raised: a fault of a probe is not one of the
    script."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.is_suspended:
            return None
        try:
            return function(*args, **kwargs)
        except Exception:
            recorder.problem(getattr(function, "__qualname__", str(function)))
            return None

    return call  # type: ignore[return-value]


_replaced: list[tuple[Any, str, Any]] = []
"""Functions that `replace` has replaced: their owner, name, and what they were."""


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a function that TorchScript may come to, which cannot compile a probe."""
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, function)


@contextmanager
def originals() -> Iterator[None]:
    """Put back, for a while, all that was replaced by `replace`."""
    probes = [getattr(owner, name) for owner, name, _ in _replaced]
    for owner, name, original in _replaced:
        setattr(owner, name, original)
    try:
        yield
    finally:
        for (owner, name, _), probe in zip(_replaced, probes, strict=True):
            setattr(owner, name, probe)


def wrap(
    recorder: RecordWriter,
    owner: Any,
    name: str,
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Replace a function or method: `before(*args, **kwargs)` is called first, `after(result,
    *args, **kwargs)` last, and what it replaces within `around()`. None changes what it returns."""
    original = getattr(owner, name)
    first = None if before is None else guarded(recorder, before)
    last = None if after is None else guarded(recorder, after)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if first is not None:
            first(*args, **kwargs)
        with around():
            result = original(*args, **kwargs)
        if last is not None:
            last(result, *args, **kwargs)
        return result

    setattr(owner, name, call)
