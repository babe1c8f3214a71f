"""Which samples make a step, and which rank takes which microbatch. Pure arithmetic on positions."""

from __future__ import annotations

from dataclasses import dataclass


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
    shares = [share(size, rank, world_size) for rank in range(min(size, world_size))]
    return [(part.start, part.stop) for part in shares]


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

    def share(self, count: int, rank: int) -> range:
        """The microbatches out of `count` that are this rank's, perhaps none."""
        return range(rank, count, self.ranks) if self.in_turn else share(count, rank, self.ranks)

    def shares(self, count: int) -> tuple[range, ...]:
        """Of all ranks; together they are every microbatch once."""
        return tuple(self.share(count, rank) for rank in range(self.ranks))

    def rounds(self, count: int, rank: int) -> list[tuple[int, bool]]:
        """What the rank computes, (microbatch, whether it counts). In turn, who has none left computes one for nothing."""
        mine = [(place, True) for place in self.share(count, rank)]
        if self.in_turn and len(mine) < -(-count // self.ranks):
            mine.append((mine[-1][0] if mine else rank % count, False))
        return mine

    def places(self, count: int) -> list[int]:
        """Where microbatch 0, 1, ... stands when the shares of all ranks are put one after another."""
        dealt = [place for mine in self.shares(count) for place in mine]
        return sorted(range(count), key=dealt.__getitem__)


def _batches(length: int, global_batch: int) -> int:
    return -(-length // global_batch)
