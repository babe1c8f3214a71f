"""The sequence whose forward runs in this thread."""

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
    """A sequence whose tokens a forward computes on this rank."""

    layout: TokenLayout
    exchange: Literal["auto", "keys", "heads"]
    documents: Documents | None
    is_handled: bool = False
    """True inside an attention that exchanges keys itself."""
    checkpointed_blocks: int = 0
    """Number of running blocks whose recomputation will enter the sequence again."""
    counts: dict[Any, int] = field(default_factory=dict)
    """Number of calls at each site since the start of the forward."""
    chosen: Chosen = field(default_factory=Chosen)
    """The attention kernels that were used so far."""
    block_masks: dict[Any, Any] = field(default_factory=dict)
    """Masks of FlexAttention, which the layers of a forward share."""

    def places(self) -> Tensor:
        """Return the positions of this rank's tokens: (tokens,), or (samples, tokens) if rows have
        different documents."""
        own = self.layout.places
        return own if self.documents is None else self.documents.places(own)


class Forward(Protocol):
    """A forward of a sequence: a context that is entered while the model computes."""

    sequence: ActiveSequence

    def resumed(self, counts: dict[Any, int]) -> AbstractContextManager[Any]:
        """Return a context in which a recomputation continues this forward. `counts`: the calls at
        each site that came before."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.forwards: list[Forward] = []


_stack = _Stack()


def active() -> ActiveSequence | None:
    """Return the sequence of the forward that runs in this thread, if it is cut or chunked."""
    return _stack.forwards[-1].sequence if _stack.forwards else None


def activate(forward: Forward) -> None:
    _stack.forwards.append(forward)


def deactivate() -> None:
    _stack.forwards.pop()


@contextmanager
def in_checkpointed_block() -> Iterator[AbstractContextManager[Any]]:
    """Run a block whose activations are checkpointed. Yields the context of its recomputation,
    which can be entered several times."""
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
    """Continues a forward in the state that it had when this object was made."""

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
    """Leave every call in the body unchanged, because the attention exchanges keys itself."""
    sequence = active()
    if sequence is None:
        yield
        return
    before, sequence.is_handled = sequence.is_handled, True
    try:
        yield
    finally:
        sequence.is_handled = before
