"""Handles Ctrl-C while the command line is imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_end() -> Iterator[None]:
    """End the process at Ctrl-C with status 130. During an import, a `KeyboardInterrupt` would
    print a traceback, or be lost."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
