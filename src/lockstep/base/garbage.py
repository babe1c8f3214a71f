"""Python's cyclic garbage collector, paused while large packages are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while the body runs. For imports of large packages.

    The import of torch takes a sixth less time, and that of torch._dynamo, which the first optimizer imports, a third
    less.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
