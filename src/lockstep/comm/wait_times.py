"""Time that this process has waited for other ranks in collectives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class Waits:
    """The waits of one process."""

    def __init__(self) -> None:
        self.seconds = 0.0


waits = Waits()
"""The waits of this process. Waits inside torch's C++ code, as in a tensor-parallel layer, are not
counted."""


@contextmanager
def count_torch_waits() -> Iterator[None]:
    """Count the waits for torch's collectives in `waits` while the body runs."""
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

    setattr(dist.Work, "wait", wait)  # noqa: B010  # type checkers see a method of a C++ class
    try:
        yield
    finally:
        setattr(dist.Work, "wait", original)  # noqa: B010
