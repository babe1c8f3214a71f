"""Assigns samples to steps, and microbatches to ranks. Pure arithmetic on positions in the order of
samples."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

WORTHWHILE = 1.05
"""Factor by which a step must become faster to change the assignment of microbatches to ranks.
Measured times are noisy."""


def batch_span(
    step: int, *, length: int, global_batch: int, epochs: bool, drop_last: bool = False
) -> tuple[int, int]:
    """Return the positions [start, stop) of a global batch. With `epochs`, the last batch of each
    epoch may be short, or is left out with `drop_last`. Without `epochs`, all batches have
    `global_batch` samples, and may span two epochs."""
    if not epochs:
        return step * global_batch, (step + 1) * global_batch
    epoch, batch = divmod(step, _batches_per_epoch(length, global_batch, drop_last))
    start = epoch * length + batch * global_batch
    return start, min(start + global_batch, (epoch + 1) * length)


def total_steps(
    *,
    length: int,
    global_batch: int,
    steps: int | None,
    epochs: int | None,
    drop_last: bool = False,
) -> int:
    if steps is not None:
        return steps
    if epochs is None:
        raise ValueError("steps and epochs are both None")
    return epochs * _batches_per_epoch(length, global_batch, drop_last)


def microbatch_spans(size: int, microbatch: int | None, world_size: int) -> list[tuple[int, int]]:
    """Split a batch of `size` samples into spans [start, stop) of `microbatch` samples. The last
    span has the remaining samples. With `microbatch=None`, each rank gets one span. The spans are
    nearly equal, and none is empty."""
    if microbatch is not None:
        return [(start, min(start + microbatch, size)) for start in range(0, size, microbatch)]
    return split_spans([(0, size)], world_size)


def split_spans(spans: Sequence[tuple[int, int]], parts: int) -> list[tuple[int, int]]:
    """Split each span into `parts` nearly equal spans, or into single samples if the span has fewer
    than `parts` samples."""
    return [
        (start + part.start, start + part.stop)
        for start, stop in spans
        for part in (
            contiguous_range(stop - start, i, min(stop - start, parts))
            for i in range(min(stop - start, parts))
        )
    ]


def stream_shard(step: int, microbatch: int, *, microbatches: int, shards: int) -> int:
    """`shards` must be a multiple of a step's `microbatches`."""
    return microbatch + microbatches * (step % (shards // microbatches))


@lru_cache(maxsize=64)
def contiguous_range(count: int, rank: int, world_size: int) -> range:
    """Return the part of range(count) that belongs to `rank`. The sizes of the parts differ by at
    most 1, larger parts first."""
    each, larger = divmod(count, world_size)
    start = rank * each + min(rank, larger)
    return range(start, start + each + (rank < larger))


@lru_cache(maxsize=256)
def shares(count: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of microbatches of each rank for which the last rank ends as early as
    possible. `speeds` has the microbatches per second of each rank, above 0."""
    sizes = [int(count >= len(speeds))] * len(speeds)
    next_end = [
        ((size + 1) / speed, rank)
        for rank, (size, speed) in enumerate(zip(sizes, speeds, strict=True))
    ]
    heapq.heapify(next_end)
    for _ in range(count - sum(sizes)):
        _, rank = next_end[0]  # the rank that would end first with one more microbatch
        sizes[rank] += 1
        heapq.heapreplace(next_end, ((sizes[rank] + 1) / speeds[rank], rank))
    return tuple(sizes)


@lru_cache(maxsize=256)
def _shared_out(count: int, speeds: tuple[float, ...]) -> tuple[range, ...]:
    return tuple(
        range(start, stop) for start, stop in pairwise(accumulate(shares(count, speeds), initial=0))
    )


@dataclass(frozen=True, slots=True)
class MicrobatchAssignment:
    """The ranks that compute the microbatches of a step.

    Contiguous: each rank has a contiguous range of microbatches.

    Round-robin: microbatch i belongs to rank (i mod ranks). All ranks compute in every round,
    because their forwards contain collectives. A rank without a microbatch computes a dummy
    microbatch.
    """

    ranks: int
    round_robin: bool = False
    slices: int = 0
    """Number of slices into which a microbatch is split. In round i, each of the first `slices`
    ranks computes one slice of microbatch i. If microbatches are split, all methods count slices.
    With 0, microbatches are not split."""
    speeds: tuple[float, ...] = ()
    """Microbatches per second of each rank. Empty if all ranks are equally fast."""

    def indices(self, count: int, rank: int) -> range:
        if self.round_robin:
            return range(rank, count, self.per_round) if rank < self.per_round else range(0)
        return (
            _shared_out(count, self.speeds)[rank]
            if self.speeds
            else contiguous_range(count, rank, self.ranks)
        )

    def at_speeds(self, seconds: Sequence[float], count: int) -> MicrobatchAssignment | None:
        """Return the contiguous assignment for ranks that take `seconds` per microbatch. None if a
        step would hardly be faster. None if a rank's time is not known yet (NaN)."""
        if not all(0 < each < math.inf for each in seconds):
            return None
        proposed = MicrobatchAssignment(self.ranks, speeds=tuple(1 / each for each in seconds))
        before, after = (
            max(
                len(share) * each
                for share, each in zip(assigned.indices_by_rank(count), seconds, strict=True)
            )
            for assigned in (self, proposed)
        )
        return proposed if before > WORTHWHILE * after else None

    @property
    def per_round(self) -> int:
        return self.slices or self.ranks

    def indices_by_rank(self, count: int) -> tuple[range, ...]:
        return tuple(self.indices(count, rank) for rank in range(self.ranks))

    def has_dummies(self, count: int) -> bool:
        """True if a rank without a microbatch computes a dummy microbatch in some round."""
        return self.round_robin and (self.per_round < self.ranks or count % self.per_round != 0)

    def with_dummies(self, count: int, rank: int) -> list[tuple[int, bool]]:
        """Return the rank's microbatches as (index, is_dummy). A dummy microbatch only takes part
        in the collectives of all ranks' forwards. The gradient of a dummy microbatch is
        discarded."""
        computed = [(index, False) for index in self.indices(count, rank)]
        if self.round_robin:
            rounds = -(-count // self.per_round)
            computed += [(computed[-1][0] if computed else rank % count, True)] * (
                rounds - len(computed)
            )
        return computed

    def gathered_positions(self, count: int) -> list[int]:
        """Return the position of each microbatch in an all-gather of all ranks' `indices`."""
        concatenated = [index for indices in self.indices_by_rank(count) for index in indices]
        return sorted(range(count), key=concatenated.__getitem__)


def _batches_per_epoch(length: int, global_batch: int, drop_last: bool) -> int:
    return length // global_batch if drop_last else -(-length // global_batch)
