"""Imports torch for a `lockstep` command, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.base.garbage import collector_paused
from lockstep.base.system import signals_blocked


@contextmanager
def importing_torch() -> Iterator[None]:
    """Delay Ctrl-C while torch is imported. An import may swallow a `KeyboardInterrupt`, or fail
    with another error."""
    with signals_blocked(), collector_paused():
        yield
