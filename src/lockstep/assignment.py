"""Which samples make a step, and which rank takes which microbatch. Pure arithmetic on positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


def batch_span(step: int, *, length: int, global_batch: int, epochs: bool) -> tuple[int, int]:
    """The positions [start, stop) of the global batch of `step` (from 0), for a dataset of `length` samples.

    Counted in steps, batches straddle epochs and are all whole. Counted in epochs, the last batch of each epoch is short where it must be.
    """
    if not epochs:
        return step * global_batch, (step + 1) * global_batch
    epoch, batch = divmod(step, _batches(length, global_batch))
    start = epoch * length + batch * global_batch
    return start, min(start + global_batch, (epoch + 1) * length)


def steps_of(*, length: int, global_batch: int, steps: int | None, epochs: int | None) -> int:
    """Optimizer steps of a recipe of which exactly one of `steps` and `epochs` is given."""
    if steps is not None:
        return steps
    if epochs is None:
        raise ValueError("steps and epochs are both None")
    return epochs * _batches(length, global_batch)


def microbatches(size: int, microbatch: int | None, world_size: int) -> list[tuple[int, int]]:
    """The spans of a batch of `size` samples, in order; together they are [0, size), and none is empty.

    Each holds `microbatch` samples, the last one the rest. None: one nearly equal span a rank (fewer where there are fewer samples).
    """
    if microbatch is not None:
        return [(start, min(start + microbatch, size)) for start in range(0, size, microbatch)]
    return slices([(0, size)], world_size)


def slices(spans: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Each of the `spans` cut into `most` nearly equal ones, in order; into fewer where it has fewer samples, so that none is empty."""
    return [
        (start + part.start, start + part.stop)
        for start, stop in spans
        for part in (share(stop - start, place, min(stop - start, most)) for place in range(min(stop - start, most)))
    ]


def shard_of(step: int, microbatch: int, *, microbatches: int, shards: int) -> int:
    """Which of a stream's `shards`, a multiple of the `microbatches` in a step, a microbatch reads from: they take turns."""
    return microbatch + microbatches * (step % (shards // microbatches))


@lru_cache(maxsize=64)
def share(count: int, rank: int, world_size: int) -> range:
    """The part of range(count) that `rank` takes: contiguous, in rank order, sizes at most 1 apart, larger ones first, perhaps empty."""
    each, larger = divmod(count, world_size)
    start = rank * each + min(rank, larger)
    return range(start, start + each + (rank < larger))


@dataclass(frozen=True, slots=True)
class Deal:
    """Which rank takes which microbatches of a step."""

    ranks: int
    in_turn: bool = False
    """Microbatch i is rank (i mod ranks)'s, and all ranks compute in every round, as exchanges in the midst of a forward need it. False:
    each rank has a contiguous share, as soon as it is done it waits."""
    slices: int = 0
    """Not 0: every microbatch is split into so many slices (the last one of a step perhaps into fewer), and it is slices that are dealt, in
    turn to the first `slices` ranks: in round i all compute microbatch i. What is said of microbatches here is true of slices then."""

    def share(self, count: int, rank: int) -> range:
        """The microbatches out of `count` that are this rank's, perhaps none."""
        if self.in_turn:
            return range(rank, count, self.at_once) if rank < self.at_once else range(0)
        return share(count, rank, self.ranks)

    @property
    def at_once(self) -> int:
        """In turn: how many microbatches a round computes."""
        return self.slices or self.ranks

    def shares(self, count: int) -> tuple[range, ...]:
        """Of all ranks; together they are every microbatch once."""
        return tuple(self.share(count, rank) for rank in range(self.ranks))

    def rounds(self, count: int, rank: int) -> list[tuple[int, bool]]:
        """What the rank computes, (microbatch, whether it counts). In turn, who has none (left) computes one for nothing."""
        mine = [(place, True) for place in self.share(count, rank)]
        if self.in_turn:
            mine += [(mine[-1][0] if mine else rank % count, False)] * (-(-count // self.at_once) - len(mine))
        return mine

    def places(self, count: int) -> list[int]:
        """Where microbatch 0, 1, ... stands when the shares of all ranks are put one after another."""
        dealt = [place for mine in self.shares(count) for place in mine]
        return sorted(range(count), key=dealt.__getitem__)


def _batches(length: int, global_batch: int) -> int:
    return -(-length // global_batch)
