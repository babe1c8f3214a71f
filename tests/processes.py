"""Commands that tests start, with the signals that end them, and nothing of them left when a test
fails."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

LOCKSTEP = str(Path(sys.executable).parent / "lockstep")
IGNORED_IN_THE_BACKGROUND = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""Signals that `nohup`, or a shell that starts a job with `&`, has a process ignore. It passes that
on to all that it starts."""

DUMP_SIGNAL = signal.SIGRTMIN + 9

_stacks: Path | None = None


def keep_stacks_in(file: Path) -> None:
    """Name the file to which forks of this process write their stacks."""
    global _stacks
    _stacks = file
    file.touch()


def let_signals_end_what_tests_start() -> None:
    """Give commands that this process starts the default action for signals that it ignores itself.
    It goes on ignoring them.

    A handler, unlike SIG_IGN, does not outlive exec.
    """
    for number in IGNORED_IN_THE_BACKGROUND:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _do_nothing)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def ran(line: Sequence[Any], **keywords: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with its output as text."""
    return subprocess.run(line, capture_output=True, text=True, **{"check": False} | keywords)


@contextmanager
def started(line: Sequence[str], **keywords: Any) -> Iterator[subprocess.Popen[Any]]:
    """A command that leads a process group of its own. Waited for at the end; killed with its group
    if the test fails or times out.

    `subprocess.Popen` itself, as a context manager, waits without end, past the time limit of a
    test.
    """
    process = subprocess.Popen(line, start_new_session=True, **keywords)
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        with process:  # closes its pipes
            pass


def worker(launcher: int, rank: int) -> int:
    """Return the process id of a launcher's worker."""
    return next(
        child.pid
        for child in psutil.Process(launcher).children()
        if child.environ().get("RANK") == str(rank)
    )


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port on which a server can listen if it sets SO_REUSEADDR, as servers do. It is bound, so
    that the kernel gives it to nobody else."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("", 0))
        yield bound.getsockname()[1]


def write_stacks_when_asked() -> None:
    """Install a handler: on `DUMP_SIGNAL` this process writes the stacks of all its threads."""
    if _stacks is None:
        return
    descriptor = os.open(_stacks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    # the lowest numbers are those that tests expect to be free
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 900)
    os.close(descriptor)
    faulthandler.register(DUMP_SIGNAL, file=high, all_threads=True)


def stacks(processes: Sequence[psutil.Process]) -> str:
    """Return what the processes are doing: command line, state, function of the kernel, and the
    stacks of Python where a process writes them."""
    lines = []
    for process in processes:
        with suppress(psutil.Error, OSError):
            kernel = Path(f"/proc/{process.pid}/wchan").read_text()
            lines.append(
                f"{process.pid} (child of {process.ppid()}) {process.status()} in {kernel}:"
                f" {' '.join(command_line(process))[:300]}"
            )
            if _handles(process, DUMP_SIGNAL):
                process.send_signal(DUMP_SIGNAL)
    time.sleep(0.5)
    written = "" if _stacks is None else _stacks.read_text()
    return "\n".join([*lines, written])


def command_line(process: psutil.Process) -> list[str]:
    """Return the words with which it was started; none if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _handles(process: psutil.Process, number: int) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
