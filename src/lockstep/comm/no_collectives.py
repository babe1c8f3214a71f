"""Contexts for user functions that each rank calls separately: a collective in them would count
twice, or wait for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from lockstep.base.torch_private import TorchDispatchMode


class CollectiveCalled(Exception):
    """A function called a collective. The text is the collective's name."""


@contextmanager
def as_one_process(*, watched: bool = True) -> Iterator[None]:
    """While entered, `torch.distributed.is_initialized()` is False, so torchmetrics and similar
    code synchronise nothing. `watched`: also refuse collectives."""
    is_initialized = dist.is_initialized
    dist.is_initialized = _never
    try:
        with CollectivesRefused() if watched else nullcontext():
            yield
    finally:
        dist.is_initialized = is_initialized


def _never() -> bool:
    return False


class CollectivesRefused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, a collective raises `CollectiveCalled` instead of running. Takes time for each
    operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise CollectiveCalled(
                str(func.overloadpacket).rpartition(".")[2].strip("_").removesuffix("_base")
            )
        return func(*args, **(kwargs or {}))
