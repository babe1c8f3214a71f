"""Writes the record of one process, and patches the functions to record."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch

from lockstep.audit.request import AuditRequest
from lockstep.base import torch_private
from lockstep.evidence.rows import RowFile

_HERE = str(Path(__file__).resolve().parent)
Probe = Callable[..., Any]


class RecordWriter:
    """Writes the record of this process as JSON lines. A forked child writes to a new file."""

    def __init__(self, request: AuditRequest) -> None:
        self.request = request
        self.is_suspended = False
        """True while the audit itself tries an optimizer."""
        self._file: RowFile | None = None
        self._problems: set[str] = set()
        self._is_users: dict[str, bool] = {}
        self._traced: list[tuple[Any, str, Any]] = []
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
            )
        self._file.write(kind, **row)

    def write_collective(
        self,
        name: str,
        ranks: Sequence[int],
        line: str,
        *,
        shape: Sequence[Any] = (),
        floats: int = 0,
        operation: str = "",
    ) -> None:
        row = {"ranks": ranks, "shape": shape, "floats": floats, "operation": operation}
        within = torch_private.in_backward()
        self.write("collective", name=name, line=line, in_backward=within, **row)

    def line(self, *, caller_of_forward: bool = False) -> str:
        """Return path:number of the innermost line of the script. With `caller_of_forward`, return
        the line that called the model."""
        innermost = ""
        for frame in frames():
            if self.is_users_file(frame.f_code.co_filename):
                innermost = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                if not (caller_of_forward and _is_forward(frame)):
                    return innermost
        return innermost

    def is_users_file(self, name: str) -> bool:
        if name not in self._is_users:
            path = os.path.realpath(name)
            inside = any(path.startswith(root.rstrip("/") + "/") for root in self.request.roots)
            library = "site-packages" in path or path.startswith(_HERE)
            self._is_users[name] = inside and not library and not name.startswith("<")
        return self._is_users[name]

    def flush_and_end(self, reason: str) -> None:
        """End this process at once. The other ranks end at the same step."""
        self.write("end", reason=reason)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # nobody reads the output any more
                stream.flush()
        if "multiprocessing" in sys.modules:
            for child in sys.modules["multiprocessing"].active_children():
                child.kill()
        os._exit(0)

    def safely(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a probe. If the probe raises, record the exception, and let the script continue."""
        if self.is_suspended:
            return None
        try:
            return function(*args, **kwargs)
        except Exception:
            where = getattr(function, "__qualname__", str(function))
            if where not in self._problems:
                self._problems.add(where)
                self.write("problem", where=where, text=traceback.format_exc(limit=-4))
            return None

    def watch(self, owners: Any, name: str, probe: Probe, *, traced: bool = False) -> None:
        """Replace a function by `probe(original, *args, **kwargs)`. `traced` is True for a function
        that torch.compile or TorchScript may trace. A traced call uses the original function."""
        owners = owners if isinstance(owners, list) else [owners]
        original = getattr(owners[0], name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if traced and torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return probe(original, *args, **kwargs)

        for owner in owners:
            if traced:
                self._traced.append((owner, name, getattr(owner, name)))
            setattr(owner, name, call)

    def wrap(
        self,
        owners: Any,
        name: str,
        *,
        before: Probe | None = None,
        after: Probe | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Call `before(*args, **kwargs)` before a function, `after(result, *args, **kwargs)` after
        it, and the function itself inside `around()`."""

        def probe(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self.safely(before, *args, **kwargs)
            with around():
                result = original(*args, **kwargs)
            if after is not None:
                self.safely(after, result, *args, **kwargs)
            return result

        self.watch(owners, name, probe)

    @contextmanager
    def originals(self) -> Iterator[None]:
        probes = [getattr(owner, name) for owner, name, _ in self._traced]
        for owner, name, original in self._traced:
            setattr(owner, name, original)
        try:
            yield
        finally:
            for (owner, name, _), probe in zip(self._traced, probes, strict=True):
                setattr(owner, name, probe)

    def _after_fork(self) -> None:
        self._file = None
        self._problems = set()
        self._stacks = self._open_stacks()

    def _open_stacks(self) -> TextIO:
        """Make this process write the stacks of all its threads on SIGUSR2."""
        file = (self.request.folder / f"stacks-{os.getpid()}.txt").open("w", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        return file


def frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_forward(frame: FrameType) -> bool:
    return frame.f_code.co_name in ("forward", "_forward", "__call__") or hasattr(
        frame.f_locals.get("self"), "named_parameters"
    )
