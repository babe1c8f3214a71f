"""Python processes as forks of this one, which has imported torch: no test waits for that, 2 to 3
seconds a process.

`use()` changes what `subprocess` does with the command lines `lockstep ...`, `python SCRIPT ...`
and `python -m MODULE ...`, in this process and in those that it forks. The rest is as in a process
that was started: streams, descriptors, working directory, environment, signals, arguments, path,
exit status. What differs: /proc has this process's command line for it; strings have this process's
hashes; modules that this process has imported stay imported. A script under `lockstep audit` has
the probes, its torchrun has not.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from processes import LOCKSTEP, write_stacks_when_asked

from lockstep.audit.probes.begin import AFTER, begin_watching
from lockstep.audit.probes.install import after_import
from lockstep.audit.request import AuditRequest
from lockstep.audit.runner import SITE
from lockstep.base import temporary_folder
from lockstep.base.errors import install_excepthook
from lockstep.base.garbage import freeze_for_good
from lockstep.launch.recovery import rejoin
from lockstep.logging import recorder
from lockstep.recipe.code import texts
from lockstep.recipe.parameters import declared
from lockstep.testing.huge_pages import move_into_huge_pages

TESTS = Path(__file__).parent
READ_AT_THE_START = ("PYTHON", "LD_", "TORCH_", "MALLOC_", "MKL_", "KMP_")
"""How the variables begin that Python, its libraries or torch read when they are started or
imported."""
EXCEPT = {"PYTHONUNBUFFERED", "PYTHONWARNINGS", "PYTHONHASHSEED", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
STARTED = ("pytest",)
"""Modules that run in processes that are started."""
TRAINS = ("lockstep.launch.worker", "lockstep.search.fork_server")
"""Modules that train, in their processes or in forks of them: what they start is no fork, but for
the writers of checkpoints."""
WRITER = "lockstep.checkpoint.writer"
PRELOADED = (
    "torch._dynamo",
    "lockstep.run",
    "lockstep.launch.run_workers",
    "lockstep.launch.worker",
    "lockstep.cli.main",
)
"""What most of the processes import."""
OMP_PAUSE_HARD = 2
USES_BEFORE_MOVE = 10
GROWTH_BEFORE_MOVE = 1.25
"""This process moves its memory into huge pages after so many uses, and again once it has grown by
this factor: forks of 800 MB, and forks of those, then take 7 ms of processor time, not 50."""
_entered: dict[tuple[str, ...], Callable[[], object]] = {}
_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


_forks_watched = False
_uses = 0
_moved_bytes = 0


@contextmanager
def use(*, watched: bool = False) -> Iterator[None]:
    """Within, the Python processes that this one starts are forks of it; `watched`: those that an
    audit watches too."""
    global _forks_watched
    if missing := [name for name in PRELOADED if name not in sys.modules]:
        for name in missing:
            importlib.import_module(name)
        gc.collect()
        freeze_for_good()
    _make_forks_cheap()
    before = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = _fork  # type: ignore[attr-defined]
    _forks_watched = watched
    try:
        yield
    finally:
        _forks_watched = False
        subprocess.Popen._execute_child = before  # type: ignore[attr-defined]


def _make_forks_cheap() -> None:
    global _uses, _moved_bytes
    _uses += 1
    if _uses < USES_BEFORE_MOVE:
        return
    memory = psutil.Process().memory_info().rss
    if memory > GROWTH_BEFORE_MOVE * _moved_bytes:
        move_into_huge_pages()
        _moved_bytes = memory


def lockstep(*arguments: Any, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `lockstep ARGUMENTS` in a fork."""
    with use():
        return subprocess.run(
            [LOCKSTEP, *map(str, arguments)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )


def fork_writers() -> None:
    """From now on, the checkpoint writers that this process starts are forks of it, also if it has
    threads: a writer uses nothing that they may hold."""
    importlib.import_module(WRITER)
    subprocess.Popen._execute_child = _fork_writer  # type: ignore[attr-defined]


@contextmanager
def inside(words: Sequence[str], enter: Callable[[], object]) -> Iterator[None]:
    """Within, a command after these words, which have it run in a container, is a fork that calls
    `enter` first."""
    _entered[tuple(words)] = enter
    try:
        yield
    finally:
        del _entered[tuple(words)]


def _fork(
    process: Any,
    args: Any,
    executable: Any,
    preexec_fn: Callable[[], object] | None,
    close_fds: bool,
    pass_fds: Sequence[int],
    cwd: Any,
    env: Mapping[str, str] | None,
    startupinfo: Any,
    creationflags: int,
    shell: bool,
    p2cread: int,
    p2cwrite: int,
    c2pread: int,
    c2pwrite: int,
    errread: int,
    errwrite: int,
    restore_signals: bool,
    gid: Any,
    gids: Any,
    uid: Any,
    umask: int,
    start_new_session: bool,
    process_group: int,
) -> None:
    """Take the place of `subprocess.Popen._execute_child`."""
    if _is_writer(args):
        streams = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        options = (cwd, env, startupinfo, creationflags, shell)
        _fork_writer(process, args, executable, preexec_fn, close_fds, pass_fds, *options, *streams)
        return
    given = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
    body = None
    if not (shell or isinstance(args, str | bytes) or not close_fds):
        enter, line = _inside([os.fsdecode(word) for word in args])
        body = _body(line, env)
    if body is None or (cwd is not None and not os.path.isdir(cwd)):
        rest = (restore_signals, gid, gids, uid, umask, start_new_session, process_group)
        before = (
            args,
            executable,
            preexec_fn,
            close_fds,
            pass_fds,
            cwd,
            env,
            startupinfo,
            creationflags,
            shell,
        )
        _execute_child(process, *before, *given, *rest)
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # where nobody reads
            stream.flush()
    # here: a look at all modules in the fork would copy the pages that they are on
    own = _own_modules()
    pipes = _pipes()
    _end_threads_of_openmp()
    parent = os.getpid()
    number = os.fork()
    if number == 0:
        try:
            # Garbage of the test, such as a store whose thread and pipes are not in the fork, would
            # end the process. It also hides what the test has open from those who close all files.
            freeze_for_good()
            if start_new_session:
                os.setsid()
            if cwd is not None:
                os.chdir(cwd)
            # In a fork, libuv closes its pipe by its numbers, and opens another one. If that were
            # closed here, the next fork would close what has its numbers then.
            of_libuv = _pipes().items() - pipes.items()
            _own_descriptors(
                (p2cread, c2pwrite, errwrite), pass_fds, [number for number, _ in of_libuv]
            )
            sys.orig_argv[:] = [*([sys.executable] if line[0] == LOCKSTEP else []), *line]
            _own_environment(
                {
                    os.fsdecode(name): os.fsdecode(value)
                    for name, value in (os.environ if env is None else env).items()
                }
            )
            _default_signals()
            _wait_until_asleep(parent)
            if preexec_fn is not None:
                preexec_fn()
            enter()
            _run(body, own)
        finally:
            os._exit(255)
    process.pid = number
    process._child_created = True
    process._close_pipe_fds(*given)


def _wait_until_asleep(parent: int) -> None:
    """Wait until the parent's main thread sleeps, at most a second. A launcher starts its workers
    one after another, and has a thread that serves a store. If the first worker connected while
    the next one is forked, that thread could hold a lock of the C library, such as that of name
    lookups, and the fork would wait for the lock without end."""
    stat = Path(f"/proc/{parent}/task/{parent}/stat")
    asleep, deadline = 0, time.monotonic() + 1.0
    with suppress(OSError):  # the parent has ended
        while asleep < 2 and time.monotonic() < deadline:
            state = stat.read_text().rpartition(")")[2].split()[0]
            asleep = asleep + 1 if state == "S" else 0
            time.sleep(0.002)


def _is_writer(args: Any) -> bool:
    return isinstance(args, list) and args[1:4] == ["-P", "-m", WRITER]


def _fork_writer(
    process: Any,
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: Sequence[int],
    *given: Any,
) -> None:
    """Take the place of `subprocess.Popen._execute_child`, for writers of checkpoints only."""
    if not _is_writer(args):
        _execute_child(process, args, executable, preexec_fn, close_fds, pass_fds, *given)
        return
    pipes = given[5:11]
    p2cread, _, _, c2pwrite, _, errwrite = pipes
    number = os.fork()
    if number == 0:
        try:
            gc.freeze()
            _own_descriptors((p2cread, c2pwrite, errwrite), pass_fds, [])
            faulthandler.enable(2)
            _default_signals()
            sys.argv = args[3:]
            importlib.import_module(WRITER).main()
        finally:
            os._exit(255)
    process.pid = number
    process._child_created = True
    process._close_pipe_fds(*pipes)


def _inside(line: list[str]) -> tuple[Callable[[], object], list[str]]:
    """Return what brings a fork to where the command runs, and the command."""
    for words, enter in _entered.items():
        if tuple(line[: len(words)]) == words:
            return enter, line[len(words) :]
    return lambda: None, line


def _body(line: list[str], env: Mapping[str, str] | None) -> Callable[[], object] | None:
    """Return what the process does; None if it cannot be a fork."""
    watched = _forks_watched and (env or os.environ).get("PYTHONPATH", "").split(os.pathsep)[
        0
    ] == str(SITE)
    if env is not None:
        changed = {
            str(name)
            for name, value in env.items() ^ os.environ.items()
            if str(name) not in EXCEPT and not (watched and name == "PYTHONPATH")
        }
        if any(name.startswith(READ_AT_THE_START) for name in changed):
            return None
    if line[0] == LOCKSTEP:
        return lambda: _module("lockstep", line[1:], isolated=True)
    if line[0] != sys.executable:
        return None
    unbuffered = line[1:2] == ["-u"]
    rest = line[2:] if unbuffered else line[1:]
    isolated = rest[:1] == ["-P"]
    if isolated:
        del rest[0]
    if rest[:1] == ["-m"] and rest[1] not in STARTED:
        return lambda: _module(rest[1], rest[2:], isolated=isolated)
    if rest and rest[0].endswith(".py"):
        return lambda: _script(rest, watched=watched, unbuffered=unbuffered)
    return None


def _module(name: str, arguments: list[str], *, isolated: bool) -> None:
    sys.path[:] = ([] if isolated else [os.getcwd()]) + _path()
    if name in TRAINS:
        fork_writers()
    if name == "lockstep.launch.worker":
        sys.argv = ["worker.py", *arguments]
        importlib.import_module(name).main(arguments)
        return
    if name == "lockstep":
        sys.argv = ["lockstep", *arguments]
        importlib.import_module("lockstep.cli.main").main()
        return
    sys.argv = ["-m", *arguments]
    sys.modules.pop(name, None)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script(line: list[str], *, watched: bool, unbuffered: bool) -> None:
    sys.argv = line
    if unbuffered:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.path[:] = [os.path.dirname(os.path.realpath(line[0])), *_path()]
    if watched:
        sys.path[1:1] = os.environ["PYTHONPATH"].split(os.pathsep)
        _watch()
    runpy.run_path(line[0], run_name="__main__")


def _watch() -> None:
    """Install the probes of an audit, as its `sitecustomize` does once torch has been imported."""
    request = AuditRequest.read(os.environ)
    if request is None:
        return
    begin_watching()
    for name in AFTER:
        # torch's also installs that of FSDP
        if name in sys.modules and not name.startswith("torch."):
            after_import(sys.modules[name], request)


def _path() -> list[str]:
    """Return the path of a process that is started: without what pytest adds."""
    asked = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [
        entry
        for entry in sys.path
        if entry and (entry in asked or Path(entry) not in (TESTS, TESTS.parent))
    ]


def _end_threads_of_openmp() -> None:
    """A fork has none of OpenMP's threads, and would wait for them without end."""
    for library in _openmp():
        library.omp_pause_resource_all(OMP_PAUSE_HARD)


@cache
def _openmp() -> list[ctypes.CDLL]:
    maps = Path("/proc/self/maps").read_text()
    return [ctypes.CDLL(name) for name in set(re.findall(r"/.*libgomp.*", maps))]


def _pipes() -> dict[int, str]:
    pipes = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of this very listing
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith("pipe:"):
                pipes[int(number)] = target
    return pipes


def _own_descriptors(streams: Sequence[int], passed: Sequence[int], kept: Sequence[int]) -> None:
    copies = [os.dup(number) if number >= 0 else -1 for number in streams]
    for number, copy in enumerate(copies):
        if copy >= 0:
            os.dup2(copy, number)
    last = 2
    for number in [*sorted({*passed, *kept}), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(last + 1, number)
        last = number
    for number in passed:
        os.set_inheritable(number, True)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(  # noqa: SIM115
            number, "w", buffering=1 if number == 2 or os.isatty(number) else -1, closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _own_environment(env: dict[str, str]) -> None:
    """Use these variables, and write them where /proc/PID/environ has those of the process that was
    started, as far as there is room: those first that differ."""
    different = [name for name in env if os.environ.get(name) != env[name]]
    os.environ.clear()  # the C library's pointers into that memory go
    os.environ.update(env)
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    text = b"".join(
        os.fsencode(f"{name}={env[name]}") + b"\0" for name in dict.fromkeys([*different, *env])
    )
    ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _default_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _own_modules() -> list[str]:
    return [
        name
        for name, module in sys.modules.items()
        if str(getattr(module, "__dict__", {}).get("__file__")).startswith(str(TESTS))
        and name != "standin"  # torch has loaded it
    ]


def _own_multiprocessing() -> None:
    """Forget the parent's semaphores, processes and resource tracker: the pipe to the tracker is
    closed here, and its number may be that of another file."""
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    process._children.clear()  # type: ignore[attr-defined]
    for server in (resource_tracker._resource_tracker, forkserver._forkserver):
        type(server).__init__(server)
    atexit.register(util._exit_function)  # type: ignore[attr-defined]


def _run(body: Callable[[], object], own: list[str]) -> NoReturn:
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    temporary_folder._own = []
    _own_multiprocessing()
    random.seed()
    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1)
    tempfile.tempdir = None
    texts.cache_clear()
    declared.parameters, declared.values, declared.is_closed = {}, {}, False
    recorder._opened, rejoin._session_was_opened = [], False  # by tests that train
    for name in own:
        sys.modules.pop(name, None)
    vars(sys).pop("ps1", None)  # IPython sets it, and this process is no prompt
    sys.excepthook = sys.__excepthook__
    threading.excepthook = threading.__excepthook__  # pytest's keeps them for its report
    install_excepthook()
    faulthandler.enable(2)  # this process's is written to a file that is closed here
    write_stacks_when_asked()
    status: Any = 0
    try:
        body()
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        status = 1
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:
            status = end.code
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter's end does
    atexit._run_exitfuncs()
    with suppress(OSError):  # nobody reads it
        sys.stdout.flush()
    os._exit(status or 0)
