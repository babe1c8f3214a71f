"""Python's cyclic garbage collector, kept from looking through torch's modules again and again while they are
imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Nothing is collected meanwhile.

    For what imports much and leaves no cycles behind: torch takes a sixth less time so, and torch._dynamo, which the
    first optimizer imports, a third.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
