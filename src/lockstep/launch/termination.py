"""Signals that ask a training process to save and end, or to end at once.

Under every launcher, SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) ask the process to finish its step, save
and end. A second signal asks the process to end at once. If the launcher has passed on a signal,
the third signal asks the process to end at once, because the first two may be the same request. In
a process that lockstep started, SIGHUP asks the process to end at once. SIGTERM asks a process to
end at once if another worker has failed. Signals that the user's code handles or ignores are not
changed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from lockstep.base.errors import say
from lockstep.base.processes import end_with_parent_again, outlive_parent
from lockstep.base.system import signals
from lockstep.launch.worker_files import is_saving, is_shutting_down, was_signal_forwarded

PREEMPTED_STATUS = 75
"""Exit status of a process that saved and ended on request: EX_TEMPFAIL, "run it again"."""
INTERRUPTED_STATUS = 128 + signal.SIGINT
HUNG_STATUS = 76
PREEMPTING = signals("SIGTERM", "SIGUSR1", "SIGINT")
ENDING = signals("SIGHUP")
"""Signals that ask a worker to end at once."""
END_SECONDS = 30.0
SAVE_SECONDS = 600.0

INTERRUPTED = "interrupted: saves after this step, and ends; Ctrl-C again ends at once"

_is_worker = False
# name of a signal that asked to save and end after the last step of a training: the next training
# in this process acts on it
_unanswered: str | None = None


def in_a_worker() -> None:
    """Called once, before the user's code runs."""
    global _is_worker
    _is_worker = True


class Preempted(SystemExit):
    """The run was asked to end early, and has saved. Not an `Exception`, so `except Exception` does
    not catch it."""

    def __init__(self, reason: str, status: int = PREEMPTED_STATUS) -> None:
        super().__init__(status)
        self.reason = reason


class Interrupted(Preempted, KeyboardInterrupt):
    """The run was interrupted by Ctrl-C, and has saved. Uncaught, it ends the process with status
    130."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, INTERRUPTED_STATUS)


def preempted(reason: str) -> Preempted:
    return Interrupted(reason) if reason == signal.SIGINT.name else Preempted(reason)


class Terminated(SystemExit):
    """A signal asked this process to end. Not an `Exception`, so `except Exception` does not catch
    it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name}, from the launcher or from outside the run"


def _is_on_one_machine() -> bool:
    """True if all ranks are on this machine, so that the end of the launcher affects all ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
    else:
        size = int(os.environ.get("WORLD_SIZE", "1"))
    return bool(size <= int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Termination:
    """Handles the signals of `PREEMPTING` and `ENDING`, in the main thread. The first signal of
    `PREEMPTING` is recorded in `asked`. The second signal, or a signal of `ENDING`, raises
    `Terminated` (`KeyboardInterrupt` for SIGINT). After `hold`, the exception is raised only at the
    exit. A signal after the exception kills the process."""

    def __init__(self, *, saves: bool = True) -> None:
        """With `saves=False` the run has nothing to save, and the first signal ends it."""
        self._process = os.getpid()
        self._saves = saves
        self._before: dict[signal.Signals, Any] = {}
        self._held = self._failed = self._is_answered = False
        self._got: int | None = None
        self._raised = False
        self._repeated = False
        self.asked: str | None = None

    def __enter__(self) -> Termination:
        global _unanswered
        if threading.current_thread() is not threading.main_thread():
            return self
        defaults = {signal.SIG_DFL, signal.default_int_handler} if self._saves else {signal.SIG_DFL}
        for number in (*PREEMPTING, *(ENDING if _is_worker else ())):
            if (handler := signal.getsignal(number)) in defaults:
                self._before[number] = handler
                signal.signal(number, self._on_signal)
        if self._saves:
            self.asked, _unanswered = _unanswered, None
            if _is_worker:
                outlive_parent(END_SECONDS, SAVE_SECONDS, is_saving, _is_on_one_machine)
        return self

    def __exit__(self, *_: object) -> None:
        global _unanswered
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        if self._before and self._saves:
            end_with_parent_again()
        if self._got is not None and not self._raised:
            raise Terminated(self._got)
        if self.asked is None or self._is_answered:
            return
        if self.asked == signal.SIGINT.name and not self._failed:
            raise KeyboardInterrupt
        _unanswered = self.asked

    def answer(self) -> None:
        self._is_answered = True

    def hold(self, *, failed: bool) -> None:
        self._held, self._failed = True, failed

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._on_signal_in_fork(number)
            return
        is_request = (
            self._saves and number in PREEMPTING and self._got is None and not is_shutting_down()
        )
        if is_request and self.asked is None:
            self.asked = signal.Signals(number).name
            if number == signal.SIGINT and not _is_worker and os.environ.get("RANK", "0") == "0":
                tell(INTERRUPTED)
            return
        if is_request and not self._repeated and was_signal_forwarded():
            # the same request may come twice: to every process of the job, and from the launcher
            self._repeated = True
            return
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            raise KeyboardInterrupt
        if self._got is not None:
            _take_default(number)
            return
        self._got = number
        # The signal often goes to DataLoader workers too, and torch's handler of SIGCHLD would
        # raise an error when they end.
        for child in signals("SIGCHLD"):
            signal.signal(child, signal.SIG_DFL)
        if not self._held:
            self._raised = True
            raise Terminated(number)

    def _on_signal_in_fork(self, number: int) -> None:
        """Ignore the first Ctrl-C in a forked process. The terminal sends Ctrl-C to every process
        of a job, and the training process may need the fork to finish its step."""
        if number != signal.SIGINT:
            _take_default(number)
        elif self.asked is not None:
            raise KeyboardInterrupt
        self.asked = signal.SIGINT.name


def _take_default(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def tell(text: str) -> None:
    """Print a line to stderr. May be called in a signal handler."""
    lines = (
        f"\nlockstep: {text}"
        if sys.stderr is not None and sys.stderr.isatty()
        else f"lockstep: {text}"
    )
    try:
        say(lines)
    except RuntimeError:  # the signal came during a write to the same stream
        os.write(2, f"{lines}\n".encode())
