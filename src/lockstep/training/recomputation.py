"""The gradients that several ranks have computed for the same microbatches in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.recomputed import Recomputed
from lockstep.training.reducers.microbatch_checksums import MicrobatchChecksums


@dataclass(frozen=True, slots=True)
class Recomputation:
    """This rank's gradients of the step's chosen microbatches, which several ranks compute."""

    chosen: Sequence[Recomputed]
    rank: int
    own: MicrobatchChecksums
    """Checksums of the gradient of `mine`; empty if that is None."""
    again: MicrobatchChecksums
    """Checksums of the gradient that this rank has recomputed. (A dummy's are not compared.)"""
    decide: Callable[[], MicrobatchChecksums]
    """Computes the microbatch about which this rank decides, if two others differ. Every rank calls
    it; the summed gradients are lost."""
    names: Sequence[str]
    """The names of the parameters."""

    @property
    def mine(self) -> int | None:
        """The chosen microbatch that is assigned to this rank; None if there is none."""
        own = (each.microbatch for each in self.chosen if each.ranks[0] == self.rank)
        return next(own, None)
