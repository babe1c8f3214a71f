"""The signals that the launcher receives and passes on to the workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.base.system import signals
from lockstep.launch.termination import END_SECONDS, ENDING, PREEMPTING

GRACE_SECONDS = dict.fromkeys(signals("SIGQUIT"), 5.0) | dict.fromkeys(
    (*PREEMPTING, *ENDING), END_SECONDS
)
"""Seconds from a signal, which the launcher passes on, to SIGKILL. A second signal ends the
wait."""


class SignalForwarding:
    """The first signal ends the run, by a `SignalException` in the main thread; while workers are
    being ended, the exception comes afterwards. A later signal ends the wait."""

    def __init__(self, on_interrupt: Callable[[], None]) -> None:
        """`on_interrupt`: called in the handler if the first signal is SIGINT."""
        self._on_interrupt = on_interrupt
        self.received: signal.Signals | None = None
        """The first signal."""
        self._is_impatient = False
        self.is_ending = False
        """True while the workers are being ended because one has failed: the run then ends with
        this failure."""
        self._is_deferred = False

    def is_asked(self) -> bool:
        """True once a signal has come."""
        return self.received is not None

    def is_impatient(self) -> bool:
        """True once a second signal has come."""
        return self._is_impatient

    def go_on(self) -> None:
        """Note that workers are no longer being ended. Raises `SignalException` for a signal that
        came meanwhile."""
        self.is_ending = False
        self._raise_received()

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle the signals, in the main thread. Those that this process ignores (nohup, a
        background job) stay ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in GRACE_SECONDS}
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise `SignalException` for a signal at the end of the body, instead of within."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        self._raise_received()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self._is_impatient = True
            return
        self.received = signal.Signals(number)
        if number == signal.SIGINT:
            self._on_interrupt()
        if not (self._is_deferred or self.is_ending):
            self._raise_received()

    def _raise_received(self) -> None:
        if self.received is not None:
            raise SignalException(self.received.name, self.received)
