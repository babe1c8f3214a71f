"""Streams: a shard's samples in the run's order, and microbatches of them. With windows of W
samples, position p of an epoch is in window p // W, and each window has its own keyed permutation.
So (epoch, position) is the whole state of a shard, and a resumed run reads only one window again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np

from lockstep import keys
from lockstep.base.errors import DataError
from lockstep.data.digests import COLLATED, DigestRequest, Digests
from lockstep.data.fetch import CPU, ShardPosition, ShardRequest, batch_of, some
from lockstep.data.generators import seed_generators
from lockstep.keys import key
from lockstep.order import Order
from lockstep.recipe.data import Stream


class Sample(NamedTuple):
    epoch: int
    position: int
    """Position in the order of the run."""
    number: int
    """Number of the sample in the shard."""
    value: Any


class Origin(NamedTuple):
    """The samples of a microbatch from a stream."""

    shard: int
    epochs: list[int]
    numbers: list[int]
    after: ShardPosition
    """The shard's position after the microbatch."""

    def __str__(self) -> str:
        pairs = zip(self.epochs, self.numbers, strict=True)
        parts = [
            f"{some([number for _, number in several])} of shard {self.shard} in epoch {epoch}"
            for epoch, several in groupby(pairs, key=lambda pair: pair[0])
        ]
        return "samples " + " and ".join(parts)

    def names(self) -> list[str]:
        return [
            f"{number} of shard {self.shard} in epoch {epoch}"
            for epoch, number in zip(self.epochs, self.numbers, strict=True)
        ]


class StreamFetcher:
    """Fetches microbatches: `fetcher[request]`. It must get all requests for a shard, in order."""

    seeds = True

    def __init__(
        self, stream: Stream, collate: Callable[[list[Any]], Any] | None, seed: int
    ) -> None:
        self._stream = stream
        self._collate = collate
        self._seed = seed
        self._open: dict[int, Iterator[Sample]] = {}

    def __getitem__(
        self, request: ShardRequest | DigestRequest | None
    ) -> tuple[Any, Origin] | Digests | None:
        """Return the batch and its origin, or `Digests`; None if the request is None. Raises
        `DataError`, and any error of the stream or of `collate`."""
        if request is None:
            return None
        if isinstance(request, DigestRequest):
            return self._digests(again=request.again)
        shard = request.shard
        if request.begin is not None:
            epoch, position = request.begin
            self._open[shard] = shard_samples(
                self._stream, shard, seed=self._seed, epoch=epoch, position=position
            )
        taken = list(islice(self._open[shard], request.size))
        after = ShardPosition(taken[-1].epoch, taken[-1].position + 1)
        epochs, _, numbers, values = map(list, zip(*taken, strict=True))
        origin = Origin(shard, epochs, numbers, after)
        return batch_of(values, self._collate, self._seed, request, lambda: str(origin)), origin

    def _digests(self, *, again: bool) -> Digests:
        """Return digests of the first sample of shard 0. Only one machine may have that shard."""
        name = "the first sample of shard 0"
        try:
            return Digests.of(
                [name],
                lambda _: next(_opened(self._stream, 0, self._seed, 0, 0)),
                None if self._collate is None else self._collated,
                again=again,
            )
        except Exception as error:
            return Digests([], None, unread=f"{name} ({type(error).__name__}: {error})")

    def _collated(self) -> Any:
        """Return a batch of the first samples of shard 0."""
        taken = list(islice(_opened(self._stream, 0, self._seed, 0, 0), COLLATED))
        request = ShardRequest(0, 0, (False,), 0, len(taken), None)
        return batch_of(
            taken,
            self._collate,
            self._seed,
            request,
            lambda: f"the first {len(taken)} samples of shard 0",
        )

    def close(self) -> None:
        self._open.clear()


def shard_samples(
    stream: Stream, shard: int, *, seed: int, epoch: int, position: int
) -> Iterator[Sample]:
    """Yield a shard's samples from a position on, epoch after epoch, with one window in memory.
    Raises `DataError` if an epoch has no sample, or ends before samples that were read earlier, and
    any error of the stream."""
    while True:
        first = position - position % stream.window
        opened = _opened(stream, shard, seed, epoch, first)
        while window := list(islice(opened, stream.window)):
            own = key(seed, keys.RandomStream.WINDOW, shard, epoch, first // stream.window)
            for place in _order(len(window), own)[position - first :]:
                value, window[place] = window[place], None
                yield Sample(epoch, position, first + place, value)
                position += 1
            first += len(window)
        if first < position:
            raise DataError(
                f"shard {shard} of the stream ends before sample {position} of epoch {epoch}, where"
                " it stood; what a shard gives must follow from shard and epoch alone; give the"
                " shards that the run began with"
            )
        if first == 0:
            raise DataError(
                f"shard {shard} of the stream has no sample in epoch {epoch}; each shard has at"
                f" least one; check what open({shard}, {epoch}, 0) reads, or give fewer shards"
            )
        epoch, position = epoch + 1, 0


def _order(count: int, seed: int) -> list[int]:
    if count == 1:
        return [0]
    order: list[int] = Order(count, seed).samples(np.arange(count))[1].tolist()
    return order


def _opened(stream: Stream, shard: int, seed: int, epoch: int, start: int) -> Iterator[Any]:
    """Yield one epoch of samples in the shard's order, with generators seeded for each sample."""
    seed_generators(key(seed, keys.RandomStream.SAMPLE, epoch, shard), CPU)
    number = start
    try:
        given = stream.open(shard, epoch, start)
        if not isinstance(given, Iterable):
            raise DataError(
                f"Stream.open({shard}, {epoch}, {start}) returned a {type(given).__name__}; it"
                " returns an iterator over the shard's samples; make it a generator function, or"
                " return iter(...)"
            )
        iterator = iter(given)
        while True:
            seed_generators(key(seed, keys.RandomStream.SAMPLE, epoch, shard, number), CPU)
            try:
                value = next(iterator)
            except StopIteration:
                return
            yield value
            number += 1
    except Exception as error:
        error.add_note(
            f"raised by sample {number} of shard {shard} in epoch {epoch}, from"
            f" Stream.open({shard}, {epoch}, {start})"
        )
        raise
