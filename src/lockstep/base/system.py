"""Operating system features that not every system has, and a parser of shell words."""

from __future__ import annotations

import errno
import math
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.base.errors import LaunchError

BINARY: int = getattr(os, "O_BINARY", 0)
"""Without `O_BINARY`, Windows writes a carriage return before each newline."""

LEAST_OPEN_FILES = 64
"""Minimum limit of open files. One worker needs about 30 files."""


def signals(*names: str) -> tuple[signal.Signals, ...]:
    return tuple(signal.Signals[name] for name in names if hasattr(signal, name))


PASSED_ON = signals("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGQUIT")


def refuse_on_windows(what: str) -> None:
    if sys.platform == "win32":
        raise LaunchError(
            f"{what} on Windows; it starts and ends processes by POSIX signals and process groups,"
            " which Windows does not have; train on one process (python train.py), or use Linux,"
            " in WSL 2 for example"
        )


def require_linux(what: str) -> None:
    if sys.platform != "linux":
        raise LaunchError(
            f"{what} on {sys.platform}; it reads Linux's /proc and limits; use Linux, or leave"
            " it out"
        )


def check_surroundings() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"the working directory cannot be found ({error.strerror}); it was deleted or replaced"
            " since the shell entered it; change to one that exists: cd ~"
        ) from None
    if sys.platform == "win32":
        return
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_OPEN_FILES:
        raise LaunchError(
            f"this process may have {limit} files open (ulimit -n); torch and lockstep need at"
            f" least {LEAST_OPEN_FILES}, and a few more for each process; raise the limit: ulimit"
            " -n 4096"
        )


def remedy_of(error: OSError) -> str | None:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "no more files may be open; raise the limit: ulimit -n 4096"
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return "make room there, or name another place; TMPDIR names the folder of temporary files"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            "give yourself the right to it, or name another place; TMPDIR is that of temporary"
            " files"
        )
    if error.errno == errno.ENAMETOOLONG:
        return "give a shorter name"
    return None


def peak_memory_bytes() -> float:
    if sys.platform == "win32":
        return math.nan
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def shell_words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(
            f"{option} {text!r}: {error}; its syntax is the shell's; close each quotation mark"
        ) from None


@contextmanager
def signals_handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals in a `with` block. Signals that this process ignores (under nohup, or in a
    background job) stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    for number, previous in before.items():
        if previous is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def signals_blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in a `with` block. A child process that is started in the block begins with
    these signals blocked. Does nothing on Windows."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # raises what the handler of a signal raises that has just arrived, and has blocked them
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers or PASSED_ON)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
