"""Microbatches of a dataset in the keyed order of a run, or of a stream from where its shards stand."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from lockstep import assignment
from lockstep.base.errors import DataError
from lockstep.data import shards
from lockstep.data.device import pin
from lockstep.data.fetch import Fetcher, Request
from lockstep.data.isolation import Isolation
from lockstep.data.structure import difference, structure
from lockstep.data.workers import Workers
from lockstep.order import Order
from lockstep.recipe import Stream

CHUNK_POSITIONS = 4096


@dataclass(slots=True)
class Span:
    """Where a microbatch stands in a run."""

    step: int
    index: int
    """Of the microbatch in its step."""
    start: int
    """Its positions are [start, stop)."""
    stop: int
    is_dummy: bool = False
    """True if it is computed only so that a collective has all its ranks; its gradient is discarded."""


@dataclass(slots=True)
class Microbatch:
    """The samples of a span, collated, on the host."""

    step: int
    index: int
    is_dummy: bool
    """See `Span`."""
    size: int
    """Samples."""
    batch: Any
    origin: shards.Origin | None = None
    """Of a stream's: which samples they are."""


class Loader:
    """Fetches microbatches of a map-style dataset. Each rank makes its own, and asks it for its own spans.

    `collate`: (samples) -> batch; None: torch's default collate. `shuffle=False`: the sample at a position is the
    position itself. `workers`: processes that fetch ahead, `prefetch` microbatches each; 0: this process fetches when
    asked. The batches are the same, and this process's default generators are left as they are. `device`: batches are
    for it, and in pinned memory where it is CUDA.
    """

    def __init__(
        self,
        data: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        seed: int,
        shuffle: bool = True,
        workers: int = 0,
        prefetch: int = 2,
        device: torch.device,
    ) -> None:
        self._order = Order(len(data), seed) if shuffle else None
        self._fetcher = Fetcher(data, collate, seed)
        self._delivery = Delivery(self._fetcher, workers, device, prefetch=prefetch)
        self._alike = Alike()

    def fetch(self, spans: Iterable[Span]) -> Iterator[Microbatch]:
        """The microbatches of `spans`, in their order. Spans are taken as needed, a few thousand positions ahead.

        One call at a time. Raises `DataError` where the dataset changes its length, where samples do not make a batch,
        and where a batch is made otherwise than the first one; and whatever the dataset or `collate` raises.
        """
        for request, batch in self._fetched(self._requests(spans)):
            yield Microbatch(request.step, request.microbatch, request.is_dummy, len(request.samples), self._delivery.pinned(batch))

    def close(self) -> None:
        """End the worker processes."""
        self._delivery.close()

    def _fetched(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Any]]:
        if self._fetcher.gathers and not self._delivery.ahead:
            return self._fetcher.gathered(requests)
        return self._checked(requests)

    def _checked(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Any]]:
        for request, batch in self._delivery(requests):
            if self._delivery.ahead:
                self._fetcher.check_length(request)
            self._alike.check(batch, request)
            yield request, batch

    def _requests(self, spans: Iterable[Span]) -> Iterator[Request]:
        remaining = iter(spans)
        while chunk := list(_some_spans(remaining)):
            positions = np.concatenate([np.arange(span.start, span.stop) for span in chunk])
            epochs, samples = (np.zeros_like(positions), positions) if self._order is None else self._order.samples(positions)
            stop = 0
            for span in chunk:
                start, stop = stop, stop + span.stop - span.start
                yield Request(span.step, span.index, span.is_dummy, epochs[start:stop], samples[start:stop])


class StreamLoader:
    """Fetches microbatches of a stream. Each rank makes its own, and asks it for its own spans. Its arguments are those
    of `Loader`.

    A shard is always read by the same worker; others wait where there are more workers than shards.
    """

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
        self.shards = stream.shards
        self._fetcher = shards.StreamFetcher(stream, collate, seed)
        self._count = max(workers, 1)
        self._delivery = Delivery(self._fetcher, workers, device, prefetch=prefetch)
        self._alike = Alike()

    def fetch(self, spans: Iterable[Span], *, microbatches: int, positions: Mapping[int, shards.Position]) -> Iterator[Microbatch]:
        """The microbatches of `spans`, in their order; of a span, its length counts. A span that follows on itself is
        not read again.

        `microbatches`: of a global batch. `positions`: where each shard goes on; one that is not there starts. One call
        at a time. Raises what `StreamFetcher` does, and `DataError` where a batch is made otherwise than the first one.
        """
        for request, made in self._delivery(self._round_robin(self._requests(spans, microbatches, positions))):
            if request is None:
                continue
            batch, origin = made
            self._alike.check(batch, f"step {request.step}, microbatch {request.microbatch}")
            batches = [batch, *(copy.deepcopy(batch) for _ in request.are_dummies[1:])]  # before anyone changes it in place
            for is_dummy, each in zip(request.are_dummies, batches, strict=True):
                yield Microbatch(request.step, request.microbatch, is_dummy, request.size, self._delivery.pinned(each), origin)

    def close(self) -> None:
        """End the worker processes, and let go of the stream's iterators."""
        self._delivery.close()
        self._fetcher.close()

    def _requests(self, spans: Iterable[Span], microbatches: int, positions: Mapping[int, shards.Position]) -> Iterator[shards.Request]:
        begun: set[int] = set()
        for (step, index), several in groupby(spans, key=lambda span: (span.step, span.index)):
            span, *again = several
            are_dummies = (span.is_dummy, *(each.is_dummy for each in again))
            shard = assignment.stream_shard(step, index, microbatches=microbatches, shards=self.shards)
            begin = None if shard in begun else positions.get(shard, shards.Position())
            begun.add(shard)
            yield shards.Request(step, index, are_dummies, shard, span.stop - span.start, begin)

    def _round_robin(self, requests: Iterator[shards.Request]) -> Iterator[shards.Request | None]:
        """With nothing in between, so that each shard's come to one worker: workers take what is asked for in turn."""
        places: dict[int, int] = {}
        turn = 0
        for request in requests:
            place = places.setdefault(request.shard, len(places) % self._count)
            while turn != place:
                yield None
                turn = (turn + 1) % self._count
            yield request
            turn = (turn + 1) % self._count


class Delivery:
    """What a fetcher makes of requests, in their order: in this process when asked, or in `workers` processes ahead of
    time."""

    def __init__(self, fetcher: Fetcher | shards.StreamFetcher, workers: int, device: torch.device, *, prefetch: int) -> None:
        self.ahead = workers > 0
        self._fetcher = fetcher
        self._pinned = device.type == "cuda"
        self._workers = Workers(fetcher, workers, pinned=self._pinned, prefetch=prefetch) if workers else None
        self._isolation = Isolation()

    def __call__(self, requests: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Each request and what is made of it."""
        return self._in_process(requests) if self._workers is None else self._in_workers(requests, self._workers)

    def pinned(self, batch: Any) -> Any:
        """The batch, in pinned memory where it is for CUDA."""
        return pin(batch) if self._pinned else batch

    def close(self) -> None:
        """End the worker processes."""
        if self._workers is not None:
            self._workers.close()

    def _in_process(self, requests: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        for request in requests:
            if self._fetcher.seeds:
                with self._isolation:
                    made = self._fetcher[request]
            else:
                made = self._fetcher[request]
            yield request, made

    def _in_workers(self, requests: Iterator[Any], workers: Workers) -> Iterator[tuple[Any, Any]]:
        asked: deque[Any] = deque()

        def noted() -> Iterator[Any]:
            for request in requests:
                asked.append(request)
                yield request

        for made in workers.fetch(noted()):
            yield asked.popleft(), made


class Alike:
    """Whether every batch is made as the first one."""

    def __init__(self) -> None:
        self._structure: Any = None

    def check(self, batch: Any, request: object) -> None:
        """Raises `DataError`, which says of which `request` it is."""
        made = structure(batch)
        if self._structure is None:
            self._structure = made
        elif made != self._structure and (found := difference(self._structure, made)):
            raise DataError(
                f"{request}: {found} in the first microbatch; every microbatch has the same containers, keys and dtypes (shapes may "
                "differ); make them so in the dataset or in Recipe.collate"
            )


def _some_spans(spans: Iterator[Span]) -> Iterator[Span]:
    positions = 0
    for span in spans:
        yield span
        positions += span.stop - span.start
        if positions >= CHUNK_POSITIONS:
            return
