"""Loaders of one rank's microbatches, from a map-style dataset or from a stream."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from itertools import groupby, tee
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep import assignment
from lockstep.base import accelerator
from lockstep.base.errors import DataError
from lockstep.data.device import pin
from lockstep.data.digests import DigestRequest, Digests
from lockstep.data.fetch import Fetcher, SampleRequest, ShardRequest
from lockstep.data.generators import PreservedGenerators
from lockstep.data.positions import Position, beginning
from lockstep.data.sampled_order import SampleOrder
from lockstep.data.streams import Origin, StreamFetcher
from lockstep.data.workers import LoaderWorkers
from lockstep.order import Order
from lockstep.recipe.data import Stream

CHUNK_POSITIONS = 4096


@dataclass(slots=True)
class Span:
    """A microbatch that a rank computes: the positions [start, stop) in the run's order of
    samples."""

    step: int
    index: int
    start: int
    stop: int
    is_dummy: bool = False
    """True if this rank computes the microbatch only to take part in collectives. The gradient of a
    dummy microbatch is discarded."""


@dataclass(slots=True)
class Microbatch:
    """The collated samples of a microbatch, on the host."""

    step: int
    index: int
    is_dummy: bool
    size: int
    batch: Any
    origin: Origin | None = None
    """None for a map-style dataset."""


@dataclass(frozen=True, slots=True)
class SamplesLeftOut:
    """Samples of a map-style dataset that one step leaves out of its global batch."""

    step: int
    """Number of steps done before the step."""
    samples: frozenset[int]
    """Indices of the samples in the dataset."""


class _BatchLoader:
    """Fetches batches in order. With `workers`, processes fetch batches ahead of time."""

    def __init__(
        self, fetcher: Fetcher | StreamFetcher, workers: int, device: torch.device, *, prefetch: int
    ) -> None:
        self._seeds, self._fetch_one = fetcher.seeds, fetcher.__getitem__
        self._pinned = accelerator.has_streams(device)
        self._workers: LoaderWorkers | None = None
        if workers:
            self._workers = LoaderWorkers(fetcher, workers, pinned=self._pinned, prefetch=prefetch)
        self._preserved_generators = PreservedGenerators()
        self._structure: Any = None

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def _fetched(self, requests: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        if self._workers is not None:
            submitted, ours = tee(requests)
            for made, request in zip(self._workers.fetch(submitted), ours, strict=False):
                yield request, made
            return
        for request in requests:
            with self._preserved_generators if self._seeds else nullcontext():
                made = self._fetch_one(request)
            yield request, made

    def digests(self, *, again: bool = True) -> Digests:
        """Call this method before `fetch`."""
        found: Digests = next(self._fetched(iter([DigestRequest(again)])))[1]
        return found

    def _pin(self, batch: Any) -> Any:
        return pin(batch) if self._pinned else batch

    def _check_structure(self, batch: Any, request: object) -> None:
        """Raise if the containers, keys or dtypes of the batch differ from the first batch's."""
        made = structure(batch)
        if self._structure is None:
            self._structure = made
        elif made != self._structure and (
            difference := structure_difference(self._structure, made)
        ):
            raise DataError(
                f"{request}: {difference} in the first microbatch; every microbatch has the same"
                " containers, keys and dtypes (shapes may differ); make them so in the dataset or"
                " in the collate function"
            )


class Loader(_BatchLoader):
    """Fetches one rank's microbatches of a map-style dataset. Each of `workers` processes
    prefetches `prefetch` microbatches. If `device` has streams, batches are pinned."""

    def __init__(
        self,
        data: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        seed: int,
        shuffle: bool = True,
        order: SampleOrder | None = None,
        workers: int = 0,
        prefetch: int = 2,
        ahead: int = CHUNK_POSITIONS,
        left_out: SamplesLeftOut | None = None,
        device: torch.device,
    ) -> None:
        self._ahead = ahead
        self._left_out = left_out
        self.order = order or (Order(len(data), seed) if shuffle else None)
        self._fetcher = Fetcher(data, collate, seed)
        super().__init__(self._fetcher, workers, device, prefetch=prefetch)

    def fetch(self, spans: Iterable[Span]) -> Iterator[Microbatch]:
        """Only one call may be in progress at a time."""
        requests = self._requests(spans)
        only_rows = self._fetcher.gathers and self._workers is None
        for request, batch in (
            self._fetcher.gathered(requests) if only_rows else self._checked(requests)
        ):
            of = request.step, request.microbatch, request.is_dummy, len(request.samples)
            yield Microbatch(*of, self._pin(batch))

    def _checked(self, requests: Iterator[SampleRequest]) -> Iterator[tuple[SampleRequest, Any]]:
        for request, batch in self._fetched(requests):
            if self._workers is not None:
                self._fetcher.check_length(request)
            self._check_structure(batch, request)
            yield request, batch

    def _requests(self, spans: Iterable[Span]) -> Iterator[SampleRequest]:
        remaining = iter(spans)
        while chunk := list(_some_spans(remaining, self._ahead)):
            positions = np.concatenate([np.arange(span.start, span.stop) for span in chunk])
            epochs, samples = np.zeros_like(positions), positions
            if self.order is not None:
                epochs, samples = self.order.samples(positions)
            stop = 0
            for span in chunk:
                start, stop = stop, stop + span.stop - span.start
                taken = epochs[start:stop], samples[start:stop]
                if self._left_out is not None and span.step == self._left_out.step:
                    stays = ~np.isin(taken[1], list(self._left_out.samples))
                    taken = taken[0][stays], taken[1][stays]
                yield SampleRequest(span.step, span.index, span.is_dummy, *taken)


class StreamLoader(_BatchLoader):
    """Fetches one rank's microbatches of a stream. One worker process reads each shard."""

    def __init__(
        self,
        stream: Stream,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        seed: int,
        workers: int = 0,
        prefetch: int = 2,
        device: torch.device,
    ) -> None:
        self.shards, self.beginning = stream.shards, beginning(stream)
        self._fetcher = StreamFetcher(stream, collate, seed)
        self._count = max(workers, 1)
        super().__init__(self._fetcher, workers, device, prefetch=prefetch)

    def fetch(
        self, spans: Iterable[Span], *, microbatches: int, positions: Mapping[int, Position]
    ) -> Iterator[Microbatch]:
        """The positions in `spans` are ignored, because a stream is read in order. Consecutive
        spans of one microbatch are read once. Shards without an entry in `positions` begin at their
        first sample. Only one call may be in progress at a time."""
        requests = self._round_robin(self._requests(spans, microbatches, positions))
        for request, made in self._fetched(requests):
            if request is None:
                continue
            batch, origin = made
            self._check_structure(batch, request)
            # copy the batch before anyone changes it in place
            batches = [batch, *(copy.deepcopy(batch) for _ in request.are_dummies[1:])]
            for is_dummy, each in zip(request.are_dummies, batches, strict=True):
                of = request.step, request.microbatch, is_dummy, request.size
                yield Microbatch(*of, self._pin(each), origin)

    def close(self) -> None:
        super().close()
        self._fetcher.close()

    def _requests(
        self, spans: Iterable[Span], microbatches: int, positions: Mapping[int, Position]
    ) -> Iterator[ShardRequest]:
        begun: set[int] = set()
        for (step, index), several in groupby(spans, key=lambda span: (span.step, span.index)):
            span, *again = several
            are_dummies = (span.is_dummy, *(each.is_dummy for each in again))
            shard = assignment.stream_shard(
                step, index, microbatches=microbatches, shards=self.shards
            )
            begin = None if shard in begun else positions.get(shard, self.beginning)
            begun.add(shard)
            yield ShardRequest(step, index, are_dummies, shard, span.stop - span.start, begin)

    def _round_robin(self, requests: Iterator[ShardRequest]) -> Iterator[ShardRequest | None]:
        """Insert None so that one worker process gets all requests for a shard. torch's DataLoader
        gives requests to its workers in turn."""
        places: dict[int, int] = {}
        turn = 0
        for request in requests:
            place = places.setdefault(request.shard, len(places) % self._count)
            while turn != place:
                yield None
                turn = (turn + 1) % self._count
            yield request
            turn = (turn + 1) % self._count


def _some_spans(spans: Iterator[Span], most: int) -> Iterator[Span]:
    positions = 0
    for span in spans:
        yield span
        positions += span.stop - span.start
        if positions >= most:
            return


def structure(value: Any, *, is_batch: bool = True) -> Any:
    """Return a value that is equal for batches with the same containers, keys and dtypes. A list
    whose parts have equal structures has one entry for all parts. A tuple in a batch is treated
    like a list, because it may have one part per sample: torchvision's `tuple(zip(*samples))`."""
    if isinstance(value, Tensor):
        return value.dtype
    kind = type(value)
    if isinstance(value, tuple | list):
        parts = [structure(part, is_batch=False) for part in value]
        may_vary = kind is list or (kind is tuple and not is_batch)
        alike = may_vary and all(part == parts[0] for part in parts)
        return kind, parts[:1] if alike else parts
    if isinstance(value, Mapping):
        return kind, {name: structure(part, is_batch=False) for name, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        own = ((field.name, getattr(value, field.name)) for field in fields(value))
        return kind, {name: structure(part, is_batch=False) for name, part in own}
    dtype = getattr(value, "dtype", None)
    # numpy's dtypes are not kept: float64 is equal to None
    return None if dtype is None else f"an array of {dtype}"


def structure_difference(then: Any, now: Any, path: str = "batch") -> str | None:
    """Return text such as `batch['x'] is torch.int64 and was torch.float32`."""
    if then == now:
        return None
    if not (isinstance(then, tuple) and isinstance(now, tuple) and then[0] is now[0]):
        return f"{path} is {_name(now)} and was {_name(then)}"
    if isinstance(then[1], dict):
        if then[1].keys() != now[1].keys():
            return f"{path} has {list(now[1])} and had {list(then[1])}"
        pairs = {f"{path}[{name!r}]": (then[1][name], now[1][name]) for name in then[1]}
    else:
        if then[0] in (list, tuple) and not (then[1] and now[1]):
            return None  # an empty one matches any other
        if len(then[1]) != len(now[1]):
            return f"{path} has {_parts(now)} and had {_parts(then)}"
        pairs = {f"{path}[{i}]": pair for i, pair in enumerate(zip(then[1], now[1], strict=True))}
    differences = (structure_difference(*pair, where) for where, pair in pairs.items())
    return next(filter(None, differences), None)


def _parts(made: tuple[type, list[Any]]) -> str:
    kind, parts = made
    if kind in (list, tuple) and len(parts) == 1:
        return f"any number of {_name(parts[0])}"
    return f"{len(parts)} parts"


def _name(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a {made[0].__name__}"
    return str(made) if made is not None else "no tensor or container"
