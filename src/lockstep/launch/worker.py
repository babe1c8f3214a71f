"""Inside a worker process: run the user's code as Python itself would, and leave a record of how it failed.

`python -P -m lockstep.launch.worker [-m] SCRIPT ARGS...` is what `lockstep run` starts. Nothing here imports torch or multiprocessing
before the user's code does: the first would be felt, the second would remember the wrong `__main__`.

[Note: leaving] A worker does all that Python does at its end, except to take its modules and objects down. With a process group, that
aborts ("terminate called without an active exception", 4 of 15 runs of a DDP script that had done its work: a thread of the group asks
for the interpreter when there is none any more), or waits for peers that are gone.
"""

from __future__ import annotations

import _io
import atexit
import builtins
import ctypes
import faulthandler
import gc
import importlib.util
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from lockstep.base.errors import LaunchError
from lockstep.base.parent_death import die_with_parent
from lockstep.launch import grace
from lockstep.launch.failure import describe, exit_status
from lockstep.launch.termination import PREEMPTED_STATUS, Preempted, Terminated, in_a_worker

RECORD = "LOCKSTEP_WORKER_RECORD"
CRASH = "LOCKSTEP_WORKER_CRASH"
AGENT = "LOCKSTEP_WORKER_AGENT"
NEEDS_TIME = "LOCKSTEP_WORKER_NEEDS_TIME"
IS_OVER = "LOCKSTEP_WORKER_IS_OVER"
AGAIN = "LOCKSTEP_WORKER_AGAIN"
PASSED_ON = "LOCKSTEP_WORKER_PASSED_ON"

_INTERRUPTED_STATUS = 128 + signal.SIGINT


def main(arguments: Sequence[str]) -> None:
    """Run a script, or with `-m` a module, as `__main__`. A line is written whole: ranks share the terminal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    record = begin()
    if arguments[0] == "-m":
        run(lambda: _run_module(arguments[1], arguments[2:]), record)
    else:
        run(lambda: _run_script(arguments[0], arguments[1:]), record)


def begin() -> Path | None:
    """Tie this process to its launcher. Returns where the record of a failure goes; None: nobody asked for one.

    Takes the launcher's own variables out of the environment, so that what the user's code starts does not write in our place.
    """
    names = (RECORD, CRASH, AGENT, NEEDS_TIME, IS_OVER, AGAIN, PASSED_ON)
    record, crash, agent, needs_time, is_over, again, passed_on = (os.environ.pop(name, None) for name in names)
    if needs_time and is_over and again and passed_on and record:
        grace.tell_by(Path(needs_time), Path(is_over), Path(again), Path(passed_on), Path(record))
    if agent is not None:
        die_with_parent(int(agent))
    if crash is not None and not faulthandler.is_enabled():
        # Kept open for as long as the process lives: faulthandler writes to the descriptor.
        faulthandler.enable(open(crash, "w", encoding="utf-8"), all_threads=False)  # noqa: SIM115
    return Path(record) if record is not None else None


def run(body: Callable[[], object], record: Path | None) -> NoReturn:
    """Call `body` and end the process. Where `body` does not return or exit with status 0, write the record first."""
    process = os.getpid()
    hook = sys.excepthook
    in_a_worker()
    try:
        body()
    except BaseException as error:
        # A child that the user's code forked may come back up to here: it is not this worker.
        if record is None or os.getpid() != process:
            raise
        if isinstance(error, Terminated):
            _leave(128 + error.number, by=error.number)
        if isinstance(error, Preempted):
            _leave(PREEMPTED_STATUS)
        if isinstance(error, SystemExit):
            _leave_as_asked(error, record)
        status = _INTERRUPTED_STATUS if isinstance(error, KeyboardInterrupt) else exit_status(error)
        frames = _user_frames(error.__traceback__)
        describe(error, frames, status).write(record)
        if sys.excepthook is not hook and not isinstance(error, KeyboardInterrupt):
            _call_hook(error, frames)
        _leave(status)
    _leave(0)


def _call_hook(error: BaseException, frames: TracebackType | None) -> None:
    """Call the hook that the user's code has put in, as Python would; what it prints, the launcher's report says already."""
    with suppress(Exception, SystemExit), redirect_stderr(io.StringIO()):
        sys.excepthook(type(error), error, frames)


def _leave_as_asked(error: SystemExit, record: Path) -> NoReturn:
    if error.code is None or error.code == 0:
        _leave(0)
    if not isinstance(error.code, int):
        print(error.code, file=sys.stderr)
    status = error.code & 0xFF if isinstance(error.code, int) else 1
    replace(describe(error, None, status), traceback="").write(record)
    _leave(status)


def _leave(status: int, *, by: int | None = None) -> NoReturn:
    """End the process, where `by` is given by that signal. See [Note: leaving]."""
    try:
        if status == 0:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are not daemons
        atexit._run_exitfuncs()
        _close_files()
        ctypes.CDLL(None).fflush(None)
    finally:
        if by is not None:
            signal.signal(by, signal.SIG_DFL)
            os.kill(os.getpid(), by)
        os._exit(status)


def _close_files() -> None:
    """What is written and not closed goes to its file, as it does when Python takes its objects down."""
    kept = set()
    stream: Any
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(Exception):
            stream.flush()
        kept |= {id(stream), id(getattr(stream, "buffer", None))}
    # By its type: to ask an object itself could run its code.
    layered = (_io._TextIOBase, _io._BufferedIOBase)
    files: list[Any] = [found for found in gc.get_objects() if issubclass(type(found), layered) and id(found) not in kept]
    # The outer layer first: text, then what Python code lays over a file (gzip), then the file's own buffer.
    for file in sorted(files, key=lambda found: (not isinstance(found, _io._TextIOBase), type(found).__module__ == "_io")):
        with suppress(Exception):
            file.close()


def _run_script(script: str, arguments: Sequence[str]) -> None:
    path = os.path.abspath(script)
    sys.argv = [script, *arguments]
    _search_first(os.path.dirname(os.path.realpath(script)))
    with io.open_code(path) as file:
        source = file.read()
    _execute(compile(source, path, "exec", dont_inherit=True), __file__=path, __loader__=SourceFileLoader("__main__", path))


def _run_module(name: str, arguments: Sequence[str]) -> None:
    sys.argv = ["-m", *arguments]
    _search_first(os.getcwd())
    spec, code = _module_code(name)
    sys.argv[0] = spec.origin or name
    _execute(code, __file__=spec.origin, __loader__=spec.loader, __spec__=spec, __package__=spec.parent, __cached__=spec.cached)


def _module_code(name: str) -> tuple[ModuleSpec, CodeType]:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None:
        raise LaunchError(f"no module named {name!r}; -m takes the name of a module that Python can import from here; correct the name")
    if spec.submodule_search_locations is not None:
        return _module_code(f"{name}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(name)
    if code is None:
        raise LaunchError(f"the module {name!r} is not Python code; -m takes a module written in Python; name another")
    return spec, code


def _execute(code: CodeType, **attributes: Any) -> None:
    """Run code in a fresh `__main__` that stays in place, for what runs after it (atexit functions, threads) and for pickle."""
    module = ModuleType("__main__")
    module.__dict__.update({"__builtins__": builtins, "__cached__": None, **attributes})
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _search_first(directory: str) -> None:
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, directory)


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    here = os.path.dirname(__file__)
    while frames is not None and os.path.dirname(frames.tb_frame.f_code.co_filename) == here:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main(sys.argv[1:])
