"""The signals that the launcher receives and passes on to the workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.base.system import signals

GRACE_SECONDS = dict.fromkeys(signals("SIGINT", "SIGQUIT"), 5.0) | dict.fromkeys(signals("SIGTERM", "SIGUSR1", "SIGHUP"), 30.0)
"""Seconds from a signal, which the launcher passes on, to SIGKILL. A second signal ends the wait."""


class SignalForwarding:
    """The first signal ends the run, by a `SignalException` in the main thread; a later one ends the wait for it."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal."""
        self._is_impatient = False
        self.is_ending = False
        """True while the workers are being ended: a first signal then ends the wait."""
        self._is_deferred = False

    def is_impatient(self) -> bool:
        """True once a signal came while the workers were being ended."""
        return self._is_impatient

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle the signals, in the main thread. Those that this process ignores (nohup, a background job) stay
        ignored."""
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
        if self.received is not None:
            raise SignalException(self.received.name, self.received)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_ending or self.received is not None:
            self._is_impatient = True
            return
        self.received = signal.Signals(number)
        if not self._is_deferred:
            raise SignalException(self.received.name, self.received)
