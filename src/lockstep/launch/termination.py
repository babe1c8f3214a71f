"""SIGTERM and SIGHUP as an exception, in a process that lockstep started: what is open can be closed, and written down, before the end.

Under plain `python`, or another launcher, signals are the user's, and nothing here changes them.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)

_is_worker = False


def in_a_worker() -> None:
    """Say that this process is one of lockstep's workers. Called once, before the user's code runs."""
    global _is_worker
    _is_worker = True


class Terminated(SystemExit):
    """A signal asked this process to end. Not an `Exception`, so that a loop that goes on after an error ends too."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name}, from the launcher or from outside the run"


class Termination:
    """Within it, the first of `SIGNALS` raises `Terminated` in the main thread; after `hold`, only at the exit. A second one kills.

    Only in a worker's main thread, and only for signals that the user's code has left alone.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._held = False
        self._got: int | None = None
        self._raised = False

    def __enter__(self) -> Termination:
        if _is_worker and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL)
        if self._got is not None and not self._raised:
            raise Terminated(self._got)

    def hold(self) -> None:
        """Let nothing interrupt this process from here to the exit."""
        self._held = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._got is not None or os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._got = number
        # The signal often goes to loader workers too, whose end torch raises from its handler of SIGCHLD, wherever this process is then.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not self._held:
            self._raised = True
            raise Terminated(number)
