"""Gradients that several ranks have computed for the same microbatches, to find ranks that compute
wrong results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.recomputed import Recomputed
from lockstep.training.reducers.microbatch_checksums import MicrobatchChecksums


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Checksums of the gradients that this rank computes for microbatches that other ranks compute
    too."""

    chosen: Sequence[Recomputed]
    rank: int
    own: MicrobatchChecksums
    again: MicrobatchChecksums
    """Checksums of another rank's microbatch."""
    decide: Callable[[], MicrobatchChecksums]
    """If two other ranks got different gradients and this rank decides between them, computes that
    microbatch. Every rank calls it. The summed gradients are lost."""
    names: Sequence[str]

    @property
    def mine(self) -> int | None:
        """The microbatch of `chosen` that is assigned to this rank."""
        own = (each.microbatch for each in self.chosen if each.ranks[0] == self.rank)
        return next(own, None)
