"""Commands that tests start, with the signals that end them, and nothing of them left when a test
fails."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

IGNORED_IN_THE_BACKGROUND = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""Signals that `nohup`, or a shell that starts a job with `&`, has a process ignore. It passes that
on to all that it starts."""


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
