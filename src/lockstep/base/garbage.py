"""Pauses Python's garbage collector during large imports, and makes it ignore long-lived
objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection. A pause shortens the import of torch by a sixth, and the import of
    torch._dynamo by a third."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_is_frozen = False


def freeze_for_good() -> None:
    global _is_frozen
    gc.freeze()
    _is_frozen = True


def is_frozen() -> bool:
    """True if `gc.freeze` was called. `gc.get_freeze_count` would take 25 ms for 300,000
    objects."""
    return _is_frozen or gc.get_freeze_count() > 0
