"""The samples of each step, and the microbatches of each rank. Pure arithmetic on positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


def batch_span(step: int, *, length: int, global_batch: int, epochs: bool, drop_last: bool = False) -> tuple[int, int]:
    """Return the positions [start, stop) of the global batch of `step` (from 0), for a dataset of `length` samples.

    `epochs`: the last batch of each epoch may be short, or with `drop_last` is left out. False: all have
    `global_batch` samples, and may span two epochs.
    """
    if not epochs:
        return step * global_batch, (step + 1) * global_batch
    epoch, batch = divmod(step, _batches_per_epoch(length, global_batch, drop_last))
    start = epoch * length + batch * global_batch
    return start, min(start + global_batch, (epoch + 1) * length)


def total_steps(*, length: int, global_batch: int, steps: int | None, epochs: int | None, drop_last: bool = False) -> int:
    """Return the number of optimizer steps of a recipe that gives exactly one of `steps` and `epochs`."""
    if steps is not None:
        return steps
    if epochs is None:
        raise ValueError("steps and epochs are both None")
    return epochs * _batches_per_epoch(length, global_batch, drop_last)


def microbatch_spans(size: int, microbatch: int | None, world_size: int) -> list[tuple[int, int]]:
    """Split a batch of `size` samples into spans [start, stop) of `microbatch` samples; the last one has the rest.

    None: one nearly equal span per rank, none of them empty.
    """
    if microbatch is not None:
        return [(start, min(start + microbatch, size)) for start in range(0, size, microbatch)]
    return split_spans([(0, size)], world_size)


def split_spans(spans: Sequence[tuple[int, int]], parts: int) -> list[tuple[int, int]]:
    """Split each of the `spans` into `parts` nearly equal ones, or into single samples if it has fewer."""
    return [
        (start + part.start, start + part.stop)
        for start, stop in spans
        for part in (contiguous_range(stop - start, i, min(stop - start, parts)) for i in range(min(stop - start, parts)))
    ]


def stream_shard(step: int, microbatch: int, *, microbatches: int, shards: int) -> int:
    """Return the shard of a stream from which a microbatch reads. `shards` is a multiple of a step's `microbatches`."""
    return microbatch + microbatches * (step % (shards // microbatches))


@lru_cache(maxsize=64)
def contiguous_range(count: int, rank: int, world_size: int) -> range:
    """Return the part of range(count) that `rank` has: in rank order, sizes at most 1 apart, larger ones first."""
    each, larger = divmod(count, world_size)
    start = rank * each + min(rank, larger)
    return range(start, start + each + (rank < larger))


@dataclass(frozen=True, slots=True)
class MicrobatchAssignment:
    """The ranks that compute the microbatches of a step.

    Contiguous: each rank has a contiguous range of microbatches, and waits when it is done. Round-robin: microbatch i
    belongs to rank (i mod ranks), and all ranks compute in every round, because their forwards contain collectives; a
    rank that has no microbatch left computes a dummy.
    """

    ranks: int
    round_robin: bool = False
    """True: round-robin. False: contiguous."""
    slices: int = 0
    """Slices that each microbatch is split into (a short last one perhaps into fewer). 0: microbatches are not split.

    The first `slices` ranks then compute one slice each of microbatch i in round i, and the methods count slices.
    """

    def indices(self, count: int, rank: int) -> range:
        """Return the microbatches of `count` that belong to the rank, perhaps none."""
        if self.round_robin:
            return range(rank, count, self.per_round) if rank < self.per_round else range(0)
        return contiguous_range(count, rank, self.ranks)

    @property
    def per_round(self) -> int:
        """Microbatches that all ranks together compute in a round of a round-robin assignment."""
        return self.slices or self.ranks

    def indices_by_rank(self, count: int) -> tuple[range, ...]:
        """Return each rank's `indices`. Together they are range(count), each index once."""
        return tuple(self.indices(count, rank) for rank in range(self.ranks))

    def with_dummies(self, count: int, rank: int) -> list[tuple[int, bool]]:
        """Return the rank's microbatches as (index, is_dummy). A dummy's gradient is discarded."""
        computed = [(index, False) for index in self.indices(count, rank)]
        if self.round_robin:
            rounds = -(-count // self.per_round)
            computed += [(computed[-1][0] if computed else rank % count, True)] * (rounds - len(computed))
        return computed

    def gathered_positions(self, count: int) -> list[int]:
        """Return the position of microbatch 0, 1, … in the concatenation of all ranks' `indices` (a gather)."""
        concatenated = [index for indices in self.indices_by_rank(count) for index in indices]
        return sorted(range(count), key=concatenated.__getitem__)


def _batches_per_epoch(length: int, global_batch: int, drop_last: bool) -> int:
    return length // global_batch if drop_last else -(-length // global_batch)
