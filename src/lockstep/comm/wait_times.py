"""How long this process has waited for others in exchanges."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class Waits:
    """Of one process."""

    def __init__(self) -> None:
        self.seconds = 0.0


waits = Waits()
"""Of this process. Those in which torch waits without coming through Python are not in it: a tensor-parallel layer's."""


@contextmanager
def counted() -> Iterator[None]:
    """Within it, waits for torch's collectives are in `waits`."""
    if not dist.is_available():
        yield
        return
    original = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(work, *args, **kwargs)
        finally:
            waits.seconds += time.perf_counter() - began

    setattr(dist.Work, "wait", wait)  # noqa: B010  # a method of a class of C++, as types see it
    try:
        yield
    finally:
        setattr(dist.Work, "wait", original)  # noqa: B010
