"""The gradients that several ranks have computed of the same microbatches in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.recomputed import Recomputed
from lockstep.training.reducers.microbatch_checksums import MicrobatchChecksums


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The gradients of chosen microbatches of a step that this rank has computed."""

    chosen: Sequence[Recomputed]
    rank: int
    own: MicrobatchChecksums
    """Checksums of `mine`; empty without one."""
    again: MicrobatchChecksums
    """Checksums of another rank's microbatch. Those of a dummy are not compared."""
    decide: Callable[[], MicrobatchChecksums]
    """Computes the microbatch about which this rank decides. The summed gradients are lost. Every
    rank calls it."""
    names: Sequence[str]
    """The names of the parameters."""

    @property
    def mine(self) -> int | None:
        """The chosen microbatch that is assigned to this rank; None without one."""
        own = (each.microbatch for each in self.chosen if each.ranks[0] == self.rank)
        return next(own, None)
