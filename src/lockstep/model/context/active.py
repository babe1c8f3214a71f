"""The state of the forward that runs in this thread, if ranks divide the tokens of its sequences,
or if it is computed in chunks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from lockstep.model.context.documents import Documents
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.kernels import Chosen


@dataclass(slots=True)
class ActiveSequence:
    """The state of a forward that computes this rank's tokens of each sequence in a microbatch."""

    layout: TokenLayout
    exchange: Literal["auto", "keys", "heads"]
    documents: Documents | None
    is_handled: bool = False
    """True inside code of lockstep that exchanges tensors between ranks itself, such as an
    attention: calls of torch are then left unchanged."""
    checkpointed_blocks: int = 0
    """Number of running blocks with activation checkpointing, whose recomputation in the backward
    will continue this forward."""
    counts: dict[Any, int] = field(default_factory=dict)
    """Site (kind, file and line of a call of torch) -> number of its calls since the start of the
    forward."""
    chosen: Chosen = field(default_factory=Chosen)
    """The attention kernels that were used so far."""
    block_masks: dict[Any, Any] = field(default_factory=dict)
    """`BlockMask`s of FlexAttention that the layers of this forward share."""

    def places(self) -> Tensor:
        """Return the positions of this rank's tokens: their indices in the sequence, (tokens,); if
        rows hold several documents, their indices in the documents, (samples, tokens)."""
        own = self.layout.places
        return own if self.documents is None else self.documents.places(own)


class Forward(Protocol):
    """A forward of this rank's tokens: a context (`SequenceMode`) that is entered while the model
    computes."""

    sequence: ActiveSequence

    def resumed(self, counts: dict[Any, int]) -> AbstractContextManager[Any]:
        """Return a context in which the recomputation of a checkpointed block continues this
        forward. `counts`: site -> number of its calls before the block."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.forwards: list[Forward] = []


_stack = _Stack()


def active() -> ActiveSequence | None:
    """Return the state of the forward that runs in this thread; None unless the forward computes a
    rank's tokens of sequences, or draws random numbers for each chunk (`SequenceMode`)."""
    return _stack.forwards[-1].sequence if _stack.forwards else None


def activate(forward: Forward) -> None:
    _stack.forwards.append(forward)


def deactivate() -> None:
    _stack.forwards.pop()


@contextmanager
def in_checkpointed_block() -> Iterator[AbstractContextManager[Any]]:
    """A context in which the forward of a block with activation checkpointing runs. Yields the
    context for the block's recomputation, which can be entered several times."""
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
    """A context in which a recomputation continues a forward in the state that the forward had when
    this object was made."""

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
    """A context in which `SequenceMode` leaves calls of torch unchanged, because the code inside
    already exchanges tensors between ranks."""
    sequence = active()
    if sequence is None:
        yield
        return
    before, sequence.is_handled = sequence.is_handled, True
    try:
        yield
    finally:
        sequence.is_handled = before
