"""A worker process. A worker runs the user's code as Python does, and writes a record if the code
fails. `lockstep run` starts a worker by `python -P -m lockstep.launch.worker [-m] SCRIPT ARGS...`.

This module does not import torch or multiprocessing before the user's code does. Torch takes
seconds, and multiprocessing would remember the wrong `__main__`.

[Note: exit] A worker ends as Python does, but does not destroy modules and objects. With a live
process group, the destruction of objects aborts or waits for lost peers. (In 4 of 15 finished runs
of a DDP script, it printed "terminate called without an active exception": a thread of the process
group acquires the GIL after finalization.)
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
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from lockstep.base.errors import LaunchError, exit_status
from lockstep.base.garbage import freeze_for_good
from lockstep.base.processes import die_with_parent, use_parents_folder
from lockstep.launch.failures import FailureRecord, failure_record
from lockstep.launch.recovery.channel import Channel, worker_channel
from lockstep.launch.recovery.rejoin import use_channel
from lockstep.launch.seeding import seed_workers_generators
from lockstep.launch.termination import (
    INTERRUPTED_STATUS,
    PREEMPTED_STATUS,
    Preempted,
    Terminated,
    in_a_worker,
)
from lockstep.launch.worker_files import WORKER, WorkerStart, damaged_start, use_files
from lockstep.recipe.code import note_source


def main(arguments: Sequence[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    record = begin()
    seed_workers_generators()
    if arguments[0] == "-m":
        run(lambda: _run_module(arguments[1], arguments[2:]), record)
    else:
        run(lambda: _run_script(arguments[0], arguments[1:]), record)


def begin() -> Path | None:
    """Make this process end with its launcher. A spare process waits here until it replaces a lost
    worker. Returns the path for the record of a failure."""
    text, told, channel = os.environ.get(WORKER, ""), WorkerStart.take(os.environ), None
    if told is None:
        use_files(None)
        use_channel(None, is_replacement=False)
        return None
    die_with_parent(told.launcher)
    try:
        channel = None if told.channel is None else worker_channel(told.channel)
    except OSError as error:
        raise damaged_start(text, error) from None
    if told.files is None and channel is not None:
        told = _wait_to_become_worker(channel, told.imports)
    use_channel(channel, is_replacement=told.is_replacement)
    if (files := use_files(told.files)) is None:
        return None
    try:
        use_parents_folder(files.stem.parent)
        if not faulthandler.is_enabled():
            # Stays open as long as the process lives: faulthandler writes to the descriptor.
            crash = open(files.crash, "w", encoding="utf-8")  # noqa: SIM115
            faulthandler.enable(crash, all_threads=False)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise damaged_start(text, error) from None
    return files.failure


def _wait_to_become_worker(channel: Channel, imports: Sequence[str]) -> WorkerStart:
    began = time.monotonic()
    for name in imports:
        import_module(name)
    prepare_process()
    channel.send("warm", import_seconds=time.monotonic() - began)
    message = channel.receive()
    if message is None:
        os._exit(0)
    os.environ.update(message["environment"])
    told = WorkerStart.take(os.environ)
    assert told is not None, "the launcher has sent it"
    return told


def prepare_process() -> None:
    """Import the modules for training. After `gc.freeze`, a recovery in place frees the old model
    in milliseconds instead of 0.2 s."""
    for name in import_module("lockstep.base.torch_private").IMPORTED_IN_TRAINING:
        import_module(name)
    gc.collect()
    freeze_for_good()


def run(body: Callable[[], object], record: Path | None) -> NoReturn:
    """Call `body` and end the process. If `body` fails, write a `FailureRecord` to the path
    `record`."""
    process = os.getpid()
    hook = sys.excepthook
    in_a_worker()
    try:
        if sys.platform != "win32":  # a launcher starts workers with SIGINT blocked
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        body()
    except BaseException as error:
        # A child process forked by the user's code may return here. It is not this worker.
        if record is None or os.getpid() != process:
            raise
        if isinstance(error, Terminated):
            _leave(128 + error.number, by=error.number)
        if isinstance(error, Preempted):
            _leave(PREEMPTED_STATUS)
        if isinstance(error, SystemExit):
            _leave_as_asked(error, record)
        status = INTERRUPTED_STATUS if isinstance(error, KeyboardInterrupt) else exit_status(error)
        frames = _user_frames(error.__traceback__)
        _write(failure_record(error, frames, status), record)
        if sys.excepthook is not hook and not isinstance(error, KeyboardInterrupt):
            _call_hook(error, frames)
        _leave(status)
    _leave(0)


def _write(failure: FailureRecord, path: Path) -> None:
    try:
        failure.write(path)
    except OSError:
        print(failure.traceback, end="", file=sys.stderr)


def _call_hook(error: BaseException, frames: TracebackType | None) -> None:
    """Call the user's excepthook. Discard the hook's output, because the launcher's report contains
    it."""
    with suppress(Exception, SystemExit), redirect_stderr(io.StringIO()):
        sys.excepthook(type(error), error, frames)


def _leave_as_asked(error: SystemExit, record: Path) -> NoReturn:
    if error.code is None or error.code == 0:
        _leave(0)
    if not isinstance(error.code, int):
        print(error.code, file=sys.stderr)
    status = error.code & 0xFF if isinstance(error.code, int) else 1
    _write(replace(failure_record(error, None, status), traceback=""), record)
    _leave(status)


def _leave(status: int, *, by: int | None = None) -> NoReturn:
    """End the process without destroying objects. The process ends with exit status `status`, or by
    the signal `by`. See [Note: exit]."""
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
    kept = set()
    stream: Any
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(Exception):
            stream.flush()
        kept |= {id(stream), id(getattr(stream, "buffer", None))}
    # Compare types, because isinstance could run an object's own code.
    layered = (_io._TextIOBase, _io._BufferedIOBase)
    files: list[Any] = [
        found
        for found in gc.get_objects()
        if issubclass(type(found), layered) and id(found) not in kept
    ]
    # Flush outer layers first: text files, then layers in Python (gzip), then the buffers of files.
    for file in sorted(
        files,
        key=lambda found: (not isinstance(found, _io._TextIOBase), type(found).__module__ == "_io"),
    ):
        with suppress(Exception):
            file.close()


def _run_script(script: str, arguments: Sequence[str]) -> None:
    path = os.path.abspath(script)
    sys.argv = [script, *arguments]
    _search_first(os.path.dirname(os.path.realpath(script)))
    with io.open_code(path) as file:
        source = file.read()
    note_source(path, source)
    _execute(
        compile(source, path, "exec", dont_inherit=True),
        __file__=path,
        __loader__=SourceFileLoader("__main__", path),
    )


def _run_module(name: str, arguments: Sequence[str]) -> None:
    sys.argv = ["-m", *arguments]
    _search_first(os.getcwd())
    spec, code = _module_code(name)
    sys.argv[0] = spec.origin or name
    _execute(
        code,
        __file__=spec.origin,
        __loader__=spec.loader,
        __spec__=spec,
        __package__=spec.parent,
        __cached__=spec.cached,
    )


def _module_code(name: str) -> tuple[ModuleSpec, CodeType]:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None:
        raise LaunchError(
            f"no module named {name!r}; -m takes the name of a module that Python can import from"
            " here; correct the name"
        )
    if spec.submodule_search_locations is not None:
        return _module_code(f"{name}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(name)
    if code is None:
        raise LaunchError(
            f"the module {name!r} is not Python code; -m takes a module written in Python; name"
            " another"
        )
    return spec, code


def _execute(code: CodeType, **attributes: Any) -> None:
    """Run code in a new `__main__` module. The module stays in `sys.modules` for atexit functions,
    threads and pickle."""
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
