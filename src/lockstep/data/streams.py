"""Reads the samples of a stream (`ls.Stream`) shard by shard, and makes microbatches of them.

Samples are shuffled within windows of W consecutive samples. Position p of an epoch is in window p
// W, and the seed determines the permutation of each window. (epoch, position) is the whole state
of a shard, and a resumed run reads only one window again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain, count, groupby, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.base.errors import DataError
from lockstep.data.digests import COLLATED, DigestRequest, Digests
from lockstep.data.fetch import CPU, ShardRequest, batch_of, some
from lockstep.data.generators import seed_generators
from lockstep.data.packing import TOGETHER, document_of, packed_rows, row_of
from lockstep.data.positions import (
    MixturePosition,
    PackedPosition,
    Position,
    ShardPosition,
)
from lockstep.keys import RandomStream, key
from lockstep.order import Order, hashed
from lockstep.recipe.data import Mixture, PackedStream, Stream

BLOCK = 1024
"""In each group of this many consecutive samples, each stream of a mixture has its share by
weight."""


class SampleName(NamedTuple):
    """The place of a sample in a stream. A row of packed documents has the place of its first
    document."""

    number: int
    place: str
    """For example "shard 0 of 'web'"."""
    epoch: int

    def __str__(self) -> str:
        return f"{self.number} of {self.place} in epoch {self.epoch}"


class Sample(NamedTuple):
    name: SampleName
    value: Any
    after: Position


class Origin(NamedTuple):
    """The places of a microbatch's samples."""

    shard: int
    samples: list[SampleName]
    after: Position
    """Position in the shard from which a resumed run continues."""

    def __str__(self) -> str:
        parts = [
            f"{some([name.number for name in several])} of {place} in epoch {epoch}"
            for (place, epoch), several in groupby(
                self.samples, key=lambda name: (name.place, name.epoch)
            )
        ]
        return "samples " + " and ".join(parts)

    def names(self) -> list[str]:
        return list(map(str, self.samples))


class StreamFetcher:
    """One fetcher must get all requests for a shard, in order."""

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
        if request is None:
            return None
        if isinstance(request, DigestRequest):
            return self._digests(again=request.again)
        shard = request.shard
        if request.begin is not None:
            self._open[shard] = shard_samples(
                self._stream, shard, seed=self._seed, begin=request.begin
            )
        names, values, positions = zip(*islice(self._open[shard], request.size), strict=True)
        origin = Origin(shard, list(names), positions[-1])
        return batch_of(
            list(values), self._collate, self._seed, request, lambda: str(origin)
        ), origin

    def _digests(self, *, again: bool) -> Digests:
        """Digest the first sample of shard 0. If this machine lacks the shard, the result has an
        error."""
        first = {"the first sample of shard 0": (self._stream, self._seed)}
        if isinstance(mixture := self._stream.open, Mixture):
            first = {
                f"the first sample of shard 0 of {name!r}": (
                    stream,
                    _seed_of_stream(self._seed, name),
                )
                for name, stream in mixture.streams.items()
            }
        opened = list(first.values())
        try:
            return Digests.of(
                first,
                lambda place: next(_unordered(opened[place][0], 0, opened[place][1])),
                None if self._collate is None else self._collated,
                again=again,
            )
        except Exception as error:
            name = next(iter(first))
            return Digests([], None, unread=f"{name} ({type(error).__name__}: {error})")

    def _collated(self) -> Any:
        taken = list(islice(_unordered(self._stream, 0, self._seed), COLLATED))
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
    stream: Stream, shard: int, *, seed: int, begin: Position, called: str = ""
) -> Iterator[Sample]:
    """Yield samples epoch after epoch, without an end."""
    match stream.open, begin:
        case Mixture() as mixture, MixturePosition():
            return _mixed(mixture, shard, seed, begin, called)
        case PackedStream() as packed, PackedPosition():
            return _packed(packed, shard, seed, begin, called)
        case _, ShardPosition():
            return _in_windows(stream, shard, seed, begin, called)
    raise AssertionError(f"{begin} in a shard of {stream}")


def _in_windows(
    stream: Stream, shard: int, seed: int, begin: ShardPosition, called: str
) -> Iterator[Sample]:
    """Keeps one window in memory."""
    epoch, position = begin
    place = _place(shard, called)
    while True:
        first = position - position % stream.window
        opened = _opened(stream, shard, seed, epoch, first, called)
        while window := list(islice(opened, stream.window)):
            own = key(seed, RandomStream.WINDOW, shard, epoch, first // stream.window)
            for number in _order(len(window), own)[position - first :]:
                value, window[number] = window[number], None
                position += 1
                name = SampleName(first + number, place, epoch)
                yield Sample(name, value, ShardPosition(epoch, position))
            first += len(window)
        if first < position:
            raise DataError(
                f"shard {shard} of the stream{called} ends before sample {position} of epoch"
                f" {epoch}, from which the run continues; a shard's samples must depend on shard"
                " and epoch only; give the shards that the run began with"
            )
        if first == 0:
            raise DataError(
                f"shard {shard} of the stream{called} has no sample in epoch {epoch}; each shard"
                f" has at least one; check what open({shard}, {epoch}, 0) reads, or give fewer"
                " shards"
            )
        epoch, position = epoch + 1, 0


def _mixed(
    mixture: Mixture, shard: int, seed: int, begin: MixturePosition, called: str
) -> Iterator[Sample]:
    """Opens all streams first: an empty stream raises at once."""
    positions = dict(begin.streams)
    names = list(mixture.streams)
    opened: list[Iterator[Sample]] = []
    for name, stream in mixture.streams.items():
        samples = shard_samples(
            stream,
            shard,
            seed=_seed_of_stream(seed, name),
            begin=positions[name],
            called=f"{called} {name!r}",
        )
        opened.append(chain([next(samples)], samples))
    weights = np.array(list(mixture.weights.values()))
    for block in count(begin.seen // BLOCK):
        chosen = chosen_streams(weights, key(seed, RandomStream.MIXTURE, shard, block))
        for seen in range(max(begin.seen, block * BLOCK), (block + 1) * BLOCK):
            which = chosen[seen % BLOCK]
            sample = next(opened[which])
            positions[names[which]] = sample.after
            yield sample._replace(after=MixturePosition(seen + 1, dict(positions)))


def chosen_streams(weights: NDArray[np.float64], seed: int) -> list[int]:
    """Choose a stream for each of `BLOCK` consecutive samples, in proportion to the weights."""
    places = Order(BLOCK, seed).samples(np.arange(BLOCK))[1]
    offset = (hashed(np.zeros(1, np.int64), seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    bounds = np.cumsum(weights / weights.sum())[:-1]
    chosen: list[int] = np.searchsorted(bounds, (places + offset) / BLOCK, side="right").tolist()
    return chosen


def _packed(
    packed: PackedStream, shard: int, seed: int, begin: PackedPosition, called: str
) -> Iterator[Sample]:
    position, given = begin
    samples = shard_samples(packed.stream, shard, seed=seed, begin=position, called=called)
    while True:
        documents = list(islice(samples, TOGETHER))
        names, values, positions = zip(*documents, strict=True)
        rows = _rows_of(values, packed.length, [f"document {name}" for name in names])
        if not rows:
            raise DataError(
                f"{TOGETHER} documents without a token, from document {names[0]} on; a row has at"
                " least one; check what tokenizes them"
            )
        for number, (first, row) in list(enumerate(rows, start=1))[given:]:
            after = (
                PackedPosition(position, number)
                if number < len(rows)
                else PackedPosition(positions[-1], 0)
            )
            name = names[first]
            yield Sample(name._replace(place=f"packed {name.place}"), row, after)
        position, given = positions[-1], 0


def _rows_of(
    values: Sequence[Any], length: int, names: Sequence[str]
) -> list[tuple[int, dict[str, Tensor]]]:
    documents = list(map(document_of, values, names))
    rows = packed_rows([len(document.tokens) for document in documents], length)
    return [
        (
            pieces[0].document,
            row_of([documents[each.document].cut(each) for each in pieces], length),
        )
        for pieces in rows
    ]


def _unordered(stream: Stream, shard: int, seed: int) -> Iterator[Any]:
    match stream.open:
        case Mixture(streams=streams):
            opened = [
                _unordered(each, shard, _seed_of_stream(seed, name))
                for name, each in streams.items()
            ]
            yield from chain.from_iterable(zip(*opened, strict=False))
        case PackedStream(stream=documents, length=length):
            values = _unordered(documents, shard, seed)
            while few := list(islice(values, COLLATED)):
                names = [f"a document of shard {shard}"] * len(few)
                yield from (row for _, row in _rows_of(few, length, names))
        case _:
            yield from _opened(stream, shard, seed, 0, 0)


def _seed_of_stream(seed: int, name: str) -> int:
    """The result does not depend on other streams of the mixture."""
    hashed_name = blake2b(name.encode(), digest_size=8).digest()
    return key(seed, RandomStream.MIXTURE, int.from_bytes(hashed_name, "big"))


def _order(count: int, seed: int) -> list[int]:
    if count == 1:
        return [0]
    order: list[int] = Order(count, seed).samples(np.arange(count))[1].tolist()
    return order


def _place(shard: int, called: str) -> str:
    return f"shard {shard} of{called}" if called else f"shard {shard}"


def _opened(
    stream: Stream, shard: int, seed: int, epoch: int, start: int, called: str = ""
) -> Iterator[Any]:
    """Seeds the default random generators before each sample."""
    seed_generators(key(seed, RandomStream.SAMPLE, epoch, shard), CPU)
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
            seed_generators(key(seed, RandomStream.SAMPLE, epoch, shard, number), CPU)
            try:
                value = next(iterator)
            except StopIteration:
                return
            yield value
            number += 1
    except Exception as error:
        error.add_note(
            f"raised by sample {number} of {_place(shard, called)} in epoch {epoch}, from"
            f" Stream.open({shard}, {epoch}, {start})"
        )
        raise
