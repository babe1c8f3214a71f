"""Compares gradients that several ranks compute for the same microbatches, to find ranks that
compute wrong results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.recomputed import Recomputed
from lockstep.training.reducers.microbatch_checksums import MicrobatchChecksums


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Checksums of gradients that this rank and other ranks compute for the same microbatches."""

    chosen: Sequence[Recomputed]
    rank: int
    own: MicrobatchChecksums
    again: MicrobatchChecksums
    """Checksums of another rank's microbatch, which this rank recomputed."""
    decide: Callable[[], MicrobatchChecksums]
    """Lets a third rank recompute a microbatch for which two ranks got different gradients. Every
    rank must call this method. The recomputation overwrites the step's summed gradients."""
    names: Sequence[str]

    @property
    def mine(self) -> int | None:
        """Return this rank's own microbatch that another rank recomputes, or None."""
        own = (each.microbatch for each in self.chosen if each.ranks[0] == self.rank)
        return next(own, None)
