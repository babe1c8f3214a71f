"""The gradients that several ranks have computed for the same microbatches in one step, to find
ranks that compute wrong results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.recomputed import Recomputed
from lockstep.training.reducers.microbatch_checksums import MicrobatchChecksums


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Checksums of the gradients that this rank computes for microbatches that other ranks compute
    too, in one step."""

    chosen: Sequence[Recomputed]
    rank: int
    own: MicrobatchChecksums
    """Checksums of the gradient of `mine`; empty if that is None."""
    again: MicrobatchChecksums
    """Checksums of the gradient that this rank has computed for another rank's microbatch."""
    decide: Callable[[], MicrobatchChecksums]
    """Computes the microbatch for which two other ranks got different gradients, if this rank
    decides between them. Every rank calls it. The summed gradients are lost."""
    names: Sequence[str]

    @property
    def mine(self) -> int | None:
        """The microbatch of `chosen` that is assigned to this rank; None if there is none."""
        own = (each.microbatch for each in self.chosen if each.ranks[0] == self.rank)
        return next(own, None)
