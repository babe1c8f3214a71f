"""Signals that ask a training process to save and end, or to end at once.

SIGTERM and SIGUSR1 ask it to save and end, under every launcher: it finishes its current step first. A second signal
asks it to end at once. If the launcher has passed a signal on, it takes a third, because the first two may be one
request. In a process that lockstep started, SIGHUP asks to end at once too, and so does SIGTERM after another worker
has failed. A signal that the user's code handles or ignores is left alone.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

from lockstep.base.system import signals
from lockstep.launch.worker_files import is_shutting_down, was_signal_forwarded

PREEMPTED_STATUS = 75
"""Exit status of a process that saved and ended because it was asked to: EX_TEMPFAIL, "run it again"."""
HUNG_STATUS = 76
"""Exit status of a process that ended because the run hung."""
PREEMPTING = signals("SIGTERM", "SIGUSR1")
"""Signals that ask a process to save and end."""
ENDING = signals("SIGHUP")
"""Signals that ask one of lockstep's workers to end at once."""

_is_worker = False


def in_a_worker() -> None:
    """Note that this process is one of lockstep's workers. Called once, before the user's code runs."""
    global _is_worker
    _is_worker = True


class Preempted(SystemExit):
    """The run was asked to end early, and has saved. Not an `Exception`: it ends loops that catch errors too."""

    def __init__(self, reason: str) -> None:
        super().__init__(PREEMPTED_STATUS)
        self.reason = reason


class Terminated(SystemExit):
    """A signal asked this process to end. Not an `Exception`, so that it also ends loops that continue after errors."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name}, from the launcher or from outside the run"


class Termination:
    """A context that handles the signals of `PREEMPTING` and `ENDING`, in the main thread.

    The first of `PREEMPTING` is noted in `asked`. One of `ENDING`, or a second signal, raises `Terminated`; after
    `hold` not before the exit. One more kills the process. Signals that the user's code handles or ignores are left
    alone.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._held = False
        self._got: int | None = None
        self._raised = False
        self._repeated = False
        self.asked: str | None = None
        """Name of the signal that asked this process to save and end. None: none did."""

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
        """Raise nothing from here to the exit."""
        self._held = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_first = self.asked is None and self._got is None and os.getpid() == self._process
        if number in PREEMPTING and is_first and not is_shutting_down():
            self.asked = signal.Signals(number).name
            return
        if number in PREEMPTING and self._got is None and not self._repeated and was_signal_forwarded() and not is_shutting_down():
            # The same request twice: from whoever signals every process of a job, and from the launcher.
            self._repeated = True
            return
        if self._got is not None or os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._got = number
        # The signal often goes to loader workers too. Torch's handler of SIGCHLD would raise an error for their end.
        for child in signals("SIGCHLD"):
            signal.signal(child, signal.SIG_DFL)
        if not self._held:
            self._raised = True
            raise Terminated(number)
