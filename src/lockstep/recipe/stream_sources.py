"""Sources of streams: uneven files, the streaming datasets of Hugging Face, and any iterable. Needs
no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any


@dataclass(frozen=True, slots=True)
class Files:
    """Uneven files as `shards` shards whose lengths differ by at most one sample. Shard k has the
    samples [k * total // shards, (k + 1) * total // shards) of all files one after another."""

    paths: Sequence[Any]
    read: Callable[[Any, int], Iterable[Any]]
    counts: Sequence[int]
    shards: int

    def __call__(self, shard: int, epoch: int, start: int) -> Iterator[Any]:
        ends = list(accumulate(self.counts))
        position, stop = (ends[-1] * each // self.shards for each in (shard, shard + 1))
        position += start
        while position < stop:
            file = bisect_right(ends, position)
            first = position - (ends[file] - self.counts[file])
            count = min(ends[file], stop) - position
            yield from islice(self.read(self.paths[file], first), count)
            position += count


@dataclass(frozen=True, slots=True)
class HuggingFaceStream:
    """A streaming dataset of Hugging Face, which shards and skips by itself."""

    data: Any
    shards: int

    def __call__(self, shard: int, epoch: int, start: int) -> Iterator[Any]:
        part = self.data.shard(num_shards=self.shards, index=shard)
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        return iter(part.skip(start) if start else part)


@dataclass(frozen=True, slots=True)
class EveryNth:
    """Any iterable as `shards` shards: shard k has the samples k, k + shards, and so on. Each shard
    reads all of it."""

    data: Iterable[Any]
    shards: int

    def __call__(self, shard: int, epoch: int, start: int) -> Iterator[Any]:
        set_epoch = getattr(self.data, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        return islice(iter(self.data), shard + start * self.shards, None, self.shards)
