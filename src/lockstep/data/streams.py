"""Streams: a shard's samples in the order in which a run sees them, and the microbatches made of
them. Position p of an epoch is in window p // W of the shard's samples in that epoch, and each
window has a keyed permutation of its own. So a shard's state is (epoch, position) on any rank, and
a resumed run reads only one window again."""

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
    """Index in the order in which the run reads the epoch's samples."""
    number: int
    """Index in the shard."""
    value: Any


class Origin(NamedTuple):
    """The samples of a microbatch: their shard, epochs and indices in the shard."""

    shard: int
    epochs: list[int]
    numbers: list[int]
    after: ShardPosition
    """The shard's position after the microbatch."""

    def __str__(self) -> str:
        parts = [
            f"{some([number for _, number in several])} of shard {self.shard} in epoch {epoch}"
            for epoch, several in groupby(
                zip(self.epochs, self.numbers, strict=True), key=lambda pair: pair[0]
            )
        ]
        return "samples " + " and ".join(parts)

    def names(self) -> list[str]:
        return [
            f"{number} of shard {self.shard} in epoch {epoch}"
            for epoch, number in zip(self.epochs, self.numbers, strict=True)
        ]


class StreamFetcher:
    """Fetches microbatches of a stream: `fetcher[request]`. It gets all requests for a shard, in
    their order."""

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
        """Return the batch and its origin, or `Digests`; None for None. Raises `DataError`, and
        what stream or `collate` raise."""
        if request is None:
            return None
        if isinstance(request, DigestRequest):
            return self._digests(again=request.again)
        shard = request.shard
        if request.begin is not None:
            self._open[shard] = samples(
                self._stream,
                shard,
                seed=self._seed,
                epoch=request.begin.epoch,
                position=request.begin.seen,
            )
        taken = list(islice(self._open[shard], request.size))
        after = ShardPosition(taken[-1].epoch, taken[-1].position + 1)
        origin = Origin(
            shard, [sample.epoch for sample in taken], [sample.number for sample in taken], after
        )
        values = [sample.value for sample in taken]
        return batch_of(values, self._collate, self._seed, request, lambda: str(origin)), origin

    def _digests(self, *, again: bool) -> Digests:
        """Return the digest of the first sample of shard 0. A machine that reads other shards may
        not have it."""
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


def samples(
    stream: Stream, shard: int, *, seed: int, epoch: int, position: int
) -> Iterator[Sample]:
    """Yield the samples of a shard from a position on, epoch after epoch, without end. Holds one
    window in memory. Raises `DataError` if an epoch has no sample, or fewer than were read of it
    before, and what the stream raises."""
    while True:
        first = position - position % stream.window
        opened = _opened(stream, shard, seed, epoch, first)
        while window := list(islice(opened, stream.window)):
            for place in _order(
                len(window),
                key(seed, keys.RandomStream.WINDOW, shard, epoch, first // stream.window),
            )[position - first :]:
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
    """Yield the samples of one epoch in the shard's own order, with the generators seeded for
    each."""
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
