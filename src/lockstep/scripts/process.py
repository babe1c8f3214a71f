"""Runs the user's script for a command: passes on its output, waits for its end, and ends every
process that it started."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from lockstep.base.errors import LaunchError
from lockstep.base.processes import (
    descendants,
    die_with_parent,
    kill_all,
    parents,
    shell_status,
    with_marker,
)
from lockstep.base.system import signals
from lockstep.base.temporary_folder import remove_left_folders
from lockstep.scripts.line import ScriptLine
from lockstep.scripts.request import REQUEST, ScriptRequest

POLL_SECONDS = 0.1
STOP_SECONDS = 5.0
"""Time from SIGTERM to SIGKILL."""
KILL_SECONDS = 10.0
TAIL_LINES = 30
OUTPUT = "output.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptEnd:
    status: int
    """Exit status as in a shell. After signal N, the status is 128 + N."""
    seconds: float
    error: str = ""
    """The last lines of the script's output. Empty if the status is 0."""
    timed_out: bool = False

    def nothing_done(self, line: ScriptLine, *, before: str, needs: str, works: str) -> LaunchError:
        """`before` is the call that the script did not reach. `needs` is the reason why the command
        needs the call. `works` is a command line that must work first."""
        if self.timed_out:
            return LaunchError(
                f"{line.script} did not come to {before} in {self.seconds:.0f} s; {needs}; give it"
                " less to do before, or a longer --timeout"
            )
        if self.status:
            return LaunchError(
                f"{line.script} failed before {before} (exit status {self.status}); {needs}; make"
                f" `{works}` work first. It ended with:\n{self.error}"
            )
        return never_trained(line, before, needs)


def never_trained(line: ScriptLine, before: str, needs: str) -> LaunchError:
    return LaunchError(
        f"{line.script} ended without {before}; {needs}; give it the arguments with which it trains"
        " (is that behind a condition that does not hold here?)"
    )


def run_script(
    command: Sequence[str],
    request: ScriptRequest,
    folder: Path,
    *,
    environ: Mapping[str, str],
    timeout_seconds: float = math.inf,
    look: Callable[[], bool] = lambda: False,
    echo: BinaryIO | None = None,
) -> ScriptEnd:
    """Run a command line to its end, and then end every process that it has started. `folder` gets
    the request and the output. `look` is called regularly, and returns True to end the script."""
    began, timed_out = time.monotonic(), False
    environ = {**environ, **request.write(folder)}
    with (folder / OUTPUT).open("wb") as output, (folder / OUTPUT).open("rb") as read:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            while process.poll() is None and not timed_out and not look():
                _pass_on(read, echo)
                timed_out = time.monotonic() - began > timeout_seconds
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
            ended = process.poll()
            # drop what a launcher that the script has started prints when it is ended
            _pass_on(read, echo)
        finally:
            _end_all(process, f"{REQUEST}={environ[REQUEST]}")
    returncode = ended if ended is not None else process.poll()
    status = shell_status(-signal.SIGKILL if returncode is None else returncode)
    text = (
        (folder / OUTPUT).read_text(encoding="utf-8", errors="replace").rstrip()
        if status or timed_out
        else ""
    )
    error = "\n".join(text.splitlines()[-TAIL_LINES:])
    return ScriptEnd(
        status=status, seconds=time.monotonic() - began, error=error, timed_out=timed_out
    )


def _end_all(root: subprocess.Popen[bytes], marker: str) -> None:
    """End all processes of the script. Also ends processes in other sessions that have the script's
    request in their environment."""

    def started() -> set[int]:
        roots = with_marker(marker) | ({root.pid} if root.poll() is None else set())
        return roots | descendants(roots)

    seen = started()
    if root.poll() is None:
        root.terminate()
        with suppress(subprocess.TimeoutExpired):
            root.wait(STOP_SECONDS)
    kill_all(lambda: (started() | seen) & parents().keys(), KILL_SECONDS)
    with suppress(subprocess.TimeoutExpired):
        root.wait(KILL_SECONDS)
    remove_left_folders(Path(tempfile.gettempdir()))


def _pass_on(read: BinaryIO, echo: BinaryIO | None) -> None:
    if (more := read.read()) and echo is not None:
        with suppress(OSError):  # the reader of the output has ended
            echo.write(more)
            echo.flush()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Convert SIGTERM and SIGHUP into an exception, so that `with` blocks end their processes. An
    ignored SIGHUP stays ignored."""
    before = {number: signal.getsignal(number) for number in signals("SIGTERM", "SIGHUP")}
    for number, handler in before.items():
        if number == signal.SIGTERM or handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
