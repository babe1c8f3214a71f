"""The state of the forward that runs in this thread, if `SequenceMode` changes its calls of
torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from lockstep.model.context.documents import Documents
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.kernels import ChosenKernels


@dataclass(slots=True)
class ActiveSequence:
    """The state of a forward that computes this rank's tokens of each sequence in a microbatch."""

    layout: TokenLayout
    exchange: Literal["auto", "keys", "heads"]
    documents: Documents | None
    is_handled: bool = False
    """True in code that exchanges tensors between ranks. `SequenceMode` does not change calls of
    torch in code that exchanges tensors."""
    checkpointed_blocks: int = 0
    counts: dict[Any, int] = field(default_factory=dict)
    chosen: ChosenKernels = field(default_factory=ChosenKernels)
    block_masks: dict[Any, Any] = field(default_factory=dict)

    def places(self) -> Tensor:
        """Return the positions of this rank's tokens. The shape is (tokens,), or (samples, tokens)
        if rows hold several documents."""
        own = self.layout.places
        return own if self.documents is None else self.documents.places(own)


class Forward(Protocol):
    sequence: ActiveSequence

    def resumed(self, counts: dict[Any, int]) -> AbstractContextManager[Any]: ...


class _Stack(threading.local):
    def __init__(self) -> None:
        self.forwards: list[Forward] = []


_stack = _Stack()


def active() -> ActiveSequence | None:
    """Return the state of this thread's forward, or None outside of `SequenceMode`."""
    return _stack.forwards[-1].sequence if _stack.forwards else None


def activate(forward: Forward) -> None:
    _stack.forwards.append(forward)


def deactivate() -> None:
    _stack.forwards.pop()


@contextmanager
def in_checkpointed_block() -> Iterator[AbstractContextManager[Any]]:
    """Run the forward of a block with activation checkpointing. Yields a reusable context for the
    block's recomputation."""
    if not _stack.forwards:
        yield nullcontext()
        return
    forward = _stack.forwards[-1]
    forward.sequence.checkpointed_blocks += 1
    try:
        yield _Resumed(forward)
    finally:
        forward.sequence.checkpointed_blocks -= 1


class _Resumed:
    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._counts = dict(forward.sequence.counts)
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        context = self._forward.resumed(self._counts)
        self._entered.append(context)
        context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


@contextmanager
def handled() -> Iterator[None]:
    sequence = active()
    if sequence is None:
        yield
        return
    before, sequence.is_handled = sequence.is_handled, True
    try:
        yield
    finally:
        sequence.is_handled = before
