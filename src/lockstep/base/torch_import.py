"""The import of torch by a `lockstep` command, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.base.garbage import collector_paused
from lockstep.base.system import signals_blocked


@contextmanager
def importing_torch() -> Iterator[None]:
    """Delay Ctrl-C: an import that it interrupts may swallow it, or fail with another error."""
    with signals_blocked(), collector_paused():
        yield
