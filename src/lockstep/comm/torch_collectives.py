"""Contexts that measure waits in torch's collectives, hide the process group from user code, or
refuse collectives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from lockstep.base.torch_private import TorchDispatchMode


class Waits:
    def __init__(self) -> None:
        self.seconds = 0.0


waits = Waits()
"""The time that this process has waited in collectives. Omits waits in torch's C++ code, as in a
tensor-parallel layer."""


@contextmanager
def count_torch_waits() -> Iterator[None]:
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


class CollectiveCalled(Exception):
    """Raised when a user's function calls a collective. The text is the collective's name."""


@contextmanager
def as_one_process(*, watched: bool = True) -> Iterator[None]:
    """Hide the process group from a user's function. `is_initialized()` returns False, so
    torchmetrics and similar libraries do not synchronise. With `watched`, a collective raises
    `CollectiveCalled`."""
    is_initialized = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        with CollectivesRefused() if watched else nullcontext():
            yield
    finally:
        dist.is_initialized = is_initialized


class CollectivesRefused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `CollectiveCalled` if the body calls a torch collective. Slows down every operation of
    the body."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise CollectiveCalled(
                str(func.overloadpacket).rpartition(".")[2].strip("_").removesuffix("_base")
            )
        return func(*args, **(kwargs or {}))
