"""Contexts that measure the time of waits in torch's collectives, that hide the process group from
user code, or that refuse collectives in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from lockstep.base.torch_private import TorchDispatchMode


class Waits:
    """The total time that this process has waited for other ranks in collectives."""

    def __init__(self) -> None:
        self.seconds = 0.0


waits = Waits()
"""The waits of this process. Waits inside torch's C++ code, as in a tensor-parallel layer, are not
counted."""


@contextmanager
def count_torch_waits() -> Iterator[None]:
    """A context in which the time of each `Work.wait` of torch's collectives is added to
    `waits`."""
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
    """Raised if a user's function calls a collective of torch where it must not. The text is the
    collective's name."""


@contextmanager
def as_one_process(*, watched: bool = True) -> Iterator[None]:
    """A context in which `torch.distributed.is_initialized()` returns False, so that torchmetrics
    and similar code do not synchronise. For a user's function that each rank calls separately.
    `watched`: True to also raise `CollectiveCalled` for collectives, which would count values twice
    or wait for ever."""
    is_initialized = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        with CollectivesRefused() if watched else nullcontext():
            yield
    finally:
        dist.is_initialized = is_initialized


class CollectivesRefused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that raises `CollectiveCalled` if the body calls a collective of torch. It slows
    down every operation of the body."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise CollectiveCalled(
                str(func.overloadpacket).rpartition(".")[2].strip("_").removesuffix("_base")
            )
        return func(*args, **(kwargs or {}))
