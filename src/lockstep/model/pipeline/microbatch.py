"""A microbatch on its way through a pipeline, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PipelineLoss:
    """A microbatch's loss, as scalars: the backward accumulates the gradient of `grad_output *
    total`."""

    total: Tensor
    grad_output: Tensor
    record: Sequence[Tensor | float]
    """Numbers that are sent to every rank, such as the loss's value and weight."""


@dataclass(frozen=True, slots=True)
class PipelineMicrobatch:
    """One microbatch. Every rank has the same ones in the same order; a rank may pass anything for
    functions that it does not call."""

    position: tuple[int, ...]
    """The start of its random streams, see `ModuleRandomStreams.start`."""
    inputs: Callable[[], Any]
    """The first part's arguments: a tuple, a dict of keywords, or one tensor. Called twice, on the
    first rank."""
    score: Callable[[Any], Any]
    """(output) -> `PipelineLoss`, or anything in a forward without backward. Called on the last
    rank."""
    is_dummy: bool = False
    """True if it is computed only for other ranks' collectives."""
