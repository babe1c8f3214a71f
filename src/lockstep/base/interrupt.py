"""Ctrl-C while the command line is imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_end() -> Iterator[None]:
    """End the process at once at Ctrl-C, with status 130. In an import, `KeyboardInterrupt` prints
    a traceback, or is lost. Use this only while there is nothing to clean up."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
