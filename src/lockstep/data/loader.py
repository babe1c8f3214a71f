"""Microbatches of a dataset in the keyed order of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.data.device import pin
from lockstep.data.fetch import Fetcher, Request
from lockstep.data.isolation import Isolation
from lockstep.data.structure import difference, structure
from lockstep.data.workers import Workers
from lockstep.errors import DataError
from lockstep.order import Order

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
    counts: bool = True
    """False: it is computed so that this rank takes part in the others' exchanges, and is no part of the step."""


@dataclass(slots=True)
class Microbatch:
    """The samples of a span, collated, on the host."""

    step: int
    index: int
    counts: bool
    size: int
    """Samples."""
    batch: Any


class Loader:
    """Fetches microbatches of a map-style dataset. Each rank makes its own, and asks it for its own spans.

    `collate`: (samples) -> batch; None: torch's default collate. `shuffle=False`: the sample at a position is the position itself.
    `workers`: processes that fetch ahead; 0: this process fetches when asked. The batches are the same, and
    this process's default generators are left as they are. `device`: batches are for it, and in pinned memory where it is CUDA.
    """

    def __init__(
        self,
        data: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        seed: int,
        shuffle: bool = True,
        workers: int = 0,
        device: torch.device,
    ) -> None:
        self._order = Order(len(data), seed) if shuffle else None
        self._fetcher = Fetcher(data, collate, seed)
        self._pinned = device.type == "cuda"
        self._workers = Workers(self._fetcher, workers, pinned=self._pinned) if workers else None
        self._isolation = Isolation()
        self._structure: Any = None

    def fetch(self, spans: Iterable[Span]) -> Iterator[Microbatch]:
        """The microbatches of `spans`, in their order. Spans are taken as needed, a few thousand positions ahead.

        One call at a time. Raises `DataError` where the dataset changes its length, where samples do not make a batch, and where a batch
        is made otherwise than the first one; and whatever the dataset or `collate` raises.
        """
        for request, batch in self._fetched(self._requests(spans)):
            yield Microbatch(request.step, request.microbatch, request.counts, len(request.samples), pin(batch) if self._pinned else batch)

    def close(self) -> None:
        """End the worker processes."""
        if self._workers is not None:
            self._workers.close()

    def _fetched(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Any]]:
        if self._workers is not None:
            return self._checked(self._in_workers(requests, self._workers))
        if self._fetcher.gathers:
            return self._fetcher.gathered(requests)
        return self._checked(self._in_process(requests))

    def _in_process(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Any]]:
        for request in requests:
            if self._fetcher.seeds:
                with self._isolation:
                    batch = self._fetcher[request]
            else:
                batch = self._fetcher[request]
            yield request, batch

    def _in_workers(self, requests: Iterator[Request], workers: Workers) -> Iterator[tuple[Request, Any]]:
        asked: deque[Request] = deque()

        def noted() -> Iterator[Request]:
            for request in requests:
                asked.append(request)
                yield request

        for batch in workers.fetch(noted()):
            request = asked.popleft()
            self._fetcher.check_length(request)
            yield request, batch

    def _requests(self, spans: Iterable[Span]) -> Iterator[Request]:
        remaining = iter(spans)
        while chunk := list(_some_spans(remaining)):
            positions = np.concatenate([np.arange(span.start, span.stop) for span in chunk])
            epochs, samples = (np.zeros_like(positions), positions) if self._order is None else self._order.samples(positions)
            stop = 0
            for span in chunk:
                start, stop = stop, stop + span.stop - span.start
                yield Request(span.step, span.index, span.counts, epochs[start:stop], samples[start:stop])

    def _checked(self, fetched: Iterator[tuple[Request, Any]]) -> Iterator[tuple[Request, Any]]:
        for request, batch in fetched:
            made = structure(batch)
            if made != self._structure:
                self._check_structure(made, request)
            yield request, batch

    def _check_structure(self, made: Any, request: Request) -> None:
        if self._structure is None:
            self._structure = made
        elif found := difference(self._structure, made):
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
