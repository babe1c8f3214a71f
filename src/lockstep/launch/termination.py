"""Signals to a process that trains: to save and end, or to end at once, with what is open closed and written down.

SIGTERM and SIGUSR1 ask for the first, under every launcher: the step at hand is finished. A second signal asks for the other (a third,
where the launcher has passed one on: that and the first may be one wish), and so do, in a process that lockstep started, SIGHUP, and
SIGTERM where another worker has failed. A signal that the user's code handles, or ignores, stays the user's.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

from lockstep.launch.worker_files import is_shutting_down, was_signal_forwarded

PREEMPTED_STATUS = 75
"""Of a process that saved and ended because it was asked to: EX_TEMPFAIL, run it again."""
HUNG_STATUS = 76
"""Of a process that ended because the run stood still."""
PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)
ENDING = (signal.SIGHUP,)

_is_worker = False


def in_a_worker() -> None:
    """Say that this process is one of lockstep's workers. Called once, before the user's code runs."""
    global _is_worker
    _is_worker = True


class Preempted(SystemExit):
    """The run was asked to end before its time, and has saved. Not an `Exception`, so that a loop that goes on after an error ends too."""

    def __init__(self, reason: str) -> None:
        super().__init__(PREEMPTED_STATUS)
        self.reason = reason


class Terminated(SystemExit):
    """A signal asked this process to end. Not an `Exception`, so that a loop that goes on after an error ends too."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name}, from the launcher or from outside the run"


class Termination:
    """Within it, the first of `PREEMPTING` is noted in `asked`, and one of `ENDING`, or a second one, raises `Terminated` in the main
    thread; after `hold`, only at the exit. One more kills.

    Only in the main thread, and only for signals that the user's code has left alone.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._held = False
        self._got: int | None = None
        self._raised = False
        self._repeated = False
        self.asked: str | None = None
        """The signal that asked this process to save and end, by name."""

    def __enter__(self) -> Termination:
        if threading.current_thread() is threading.main_thread():
            for number in (*PREEMPTING, *(ENDING if _is_worker else ())):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (*PREEMPTING, *ENDING):
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL)
        if self._got is not None and not self._raised:
            raise Terminated(self._got)

    def hold(self) -> None:
        """Let nothing interrupt this process from here to the exit."""
        self._held = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_first = self.asked is None and self._got is None and os.getpid() == self._process
        if number in PREEMPTING and is_first and not is_shutting_down():
            self.asked = signal.Signals(number).name
            return
        if number in PREEMPTING and self._got is None and not self._repeated and was_signal_forwarded() and not is_shutting_down():
            self._repeated = True  # the same wish, once from whoever signals every process of a job, and once by the launcher
            return
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
