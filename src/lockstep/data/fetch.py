from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from lockstep.base.container import LARGER_SHARED_MEMORY
from lockstep.base.counters import numbers_of_dataset
from lockstep.base.errors import DataError
from lockstep.base.torch_private import collate as collate_with, default_collate_fn_map
from lockstep.data.digests import COLLATED, DigestRequest, Digests, spread
from lockstep.data.generators import seed_generators
from lockstep.data.positions import Position
from lockstep.keys import RandomStream, key

CPU = torch.device("cpu")
GATHERED_BYTES = 2**17
GATHERED_REQUESTS = 16
"""Rows of up to this many microbatches of a TensorDataset are copied at once."""
ALIGNMENT_BYTES = 64
"""Torch's alignment. A matrix product may round differently on tensors with another alignment."""


class SampleRequest(NamedTuple):
    step: int
    microbatch: int
    is_dummy: bool
    epochs: NDArray[np.int64]
    """Epoch of each sample. A microbatch may span two epochs."""
    samples: NDArray[np.int64]

    def __str__(self) -> str:
        return f"after step {self.step}, microbatch {self.microbatch}"


class ShardRequest(NamedTuple):
    """A request for the next `size` samples of a stream's shard."""

    step: int
    microbatch: int
    are_dummies: tuple[bool, ...]
    """One entry for each computation of the microbatch: True if the rank computes it only to take
    part in collectives."""
    shard: int
    size: int
    begin: Position | None
    """The position at which to open the shard. None if the shard is open already."""

    def __str__(self) -> str:
        return f"after step {self.step}, microbatch {self.microbatch}"


class Fetcher:
    """Fetches microbatches of a map-style dataset. With a `seed`, the default random generators are
    seeded by (seed, epoch, sample) before each call of the dataset, and by (seed, step, microbatch)
    before `collate`."""

    def __init__(
        self, data: Any, collate: Callable[[list[Any]], Any] | None, seed: int | None
    ) -> None:
        self._data = data
        self._collate = collate
        self._length = len(data)
        tensors = type(data) is TensorDataset
        self._seed_of_samples = None if tensors else seed
        self._seed_of_collate = None if collate is None else seed
        self.seeds = self._seed_of_samples is not None or self._seed_of_collate is not None
        self._set_epoch = getattr(data, "set_epoch", None)
        self._make: Callable[[SampleRequest], Any] = self._one_by_one
        self.gathers = tensors and collate is None
        """True if a batch consists of rows of a TensorDataset."""
        if self.gathers:
            self._make = self._by_rows
        elif _fetches_many(data):
            self._make = self._at_once

    def __getitem__(self, request: SampleRequest | DigestRequest) -> Any:
        if isinstance(request, DigestRequest):
            return self._digests(again=request.again)
        self.check_length(request)
        return self._make(request)

    def _digests(self, *, again: bool) -> Digests:
        indices, during = spread(self._length), "before the first step"
        few = np.array(indices[:COLLATED], np.int64)
        request = SampleRequest(0, 0, False, np.zeros_like(few), few)
        collated = None if self._collate is None else lambda: self._make(request)
        at_once = _fetches_many(self._data)

        def fetch(place: int) -> Any:
            if at_once:
                return self._many(indices, 0, during)
            return self._fetch_sample(indices[place], 0, during)

        names = (
            [f"samples {some(indices)}"] if at_once else [f"sample {index}" for index in indices]
        )
        numbers = partial(numbers_of_dataset, self._data)
        return Digests.of(names, fetch, collated, again=again, numbers=numbers)

    def check_length(self, request: SampleRequest) -> None:
        if len(self._data) != self._length:
            raise DataError(
                f"the dataset has {len(self._data)} samples {request}, and had {self._length}"
                " before; the order of a run follows from the length; give data whose len() stays"
                " the same"
            )

    def gathered(
        self, requests: Iterator[SampleRequest]
    ) -> Iterator[tuple[SampleRequest, list[Tensor]]]:
        """Copy the rows of several small microbatches at once. Each microbatch gets an aligned part
        of one allocation."""
        widths = [tensor[:1].nbytes for tensor in self._data.tensors]
        rows = max(GATHERED_BYTES // max(sum(widths), 1), 1)

        def fits(size: int) -> bool:
            return all(size * width % ALIGNMENT_BYTES == 0 for width in widths)

        while several := list(_some_requests(requests, rows, fits)):
            if len(several) == 1:
                self.check_length(several[0])
                yield several[0], self._rows(several[0].samples)
                continue
            sizes = [len(request.samples) for request in several]
            together = self._rows(np.concatenate([request.samples for request in several]))
            for request, batch in zip(several, _pieces(together, sizes), strict=True):
                self.check_length(request)
                yield request, batch

    def _by_rows(self, request: SampleRequest) -> list[Tensor]:
        return self._rows(request.samples)

    def _rows(self, samples: NDArray[np.int64]) -> list[Tensor]:
        rows = torch.from_numpy(samples)
        return [
            tensor.index_select(0, rows if tensor.is_cpu else rows.to(tensor.device))
            for tensor in self._data.tensors
        ]

    def _prepare(self, epoch: int, index: int) -> None:
        if self._set_epoch is not None:
            self._set_epoch(epoch)
        if self._seed_of_samples is not None:
            seed_generators(key(self._seed_of_samples, RandomStream.SAMPLE, epoch, index), CPU)

    def _many(self, indices: list[int], epoch: int, during: object) -> Any:
        self._prepare(epoch, indices[0])
        try:
            return self._data.__getitems__(indices)
        except Exception as error:
            error.add_note(
                f"raised by __getitems__({some(indices)}) of {type(self._data).__qualname__}"
                f" {during}"
            )
            raise

    def _fetch_sample(self, index: int, epoch: int, during: object) -> Any:
        self._prepare(epoch, index)
        try:
            return self._data[index]
        except Exception as error:
            error.add_note(f"raised by sample {index} of {type(self._data).__qualname__} {during}")
            raise

    def _at_once(self, request: SampleRequest) -> Any:
        indices = request.samples.tolist()
        fetched = self._many(indices, int(request.epochs[0]), request)
        if not isinstance(fetched, list):
            return fetched
        if len(fetched) != len(indices):
            raise DataError(
                f"__getitems__ of {type(self._data).__qualname__} returned a list of"
                f" {len(fetched)} for {len(indices)} indices {request}; a list must have one item"
                " per sample, to be collated; return a tuple, a dict or a tensor for a batch made"
                " already"
            )
        return self._batch(fetched, request)

    def _one_by_one(self, request: SampleRequest) -> Any:
        drawn = zip(request.epochs.tolist(), request.samples.tolist(), strict=True)
        return self._batch(
            [self._fetch_sample(index, epoch, request) for epoch, index in drawn], request
        )

    def _batch(self, samples: list[Any], request: SampleRequest) -> Any:
        return batch_of(
            samples,
            self._collate,
            self._seed_of_collate,
            request,
            lambda: f"samples {some(request.samples.tolist())}",
        )


def batch_of(
    samples: list[Any],
    collate: Callable[[list[Any]], Any] | None,
    seed: int | None,
    request: SampleRequest | ShardRequest,
    describe: Callable[[], str],
) -> Any:
    if collate is None:
        try:
            return default_collate(samples)
        except Exception as error:
            if "unable to allocate shared memory" in str(error):
                raise DataError(
                    f"{request}: no room in /dev/shm, through which loader workers hand over"
                    f" batches ({error}); {LARGER_SHARED_MEMORY}, or plan workers=0"
                ) from error
            raise DataError(
                f"{request}: {describe()} do not make a batch: {_reason(samples, error)}; torch's"
                " default collate needs samples of one structure and shape; give Recipe.collate or"
                " Evaluation.collate, a function from a list of samples to a batch"
            ) from error
    if seed is not None:
        seed_generators(key(seed, RandomStream.COLLATE, request.step, request.microbatch), CPU)
    try:
        return collate(samples)
    except Exception as error:
        error.add_note(f"raised by collate {request}: {describe()}")
        raise


def _pieces(columns: list[Tensor], sizes: list[int]) -> list[list[Tensor]]:
    pieces = zip(*(torch.split(column, sizes) for column in columns), strict=True)
    # .data: autograd would refuse in-place changes of one of several views
    return [[piece.data for piece in batch] for batch in pieces]


def _some_requests(
    requests: Iterator[SampleRequest], rows: int, fits: Callable[[int], bool]
) -> Iterator[SampleRequest]:
    """End after a request whose number of samples breaks the alignment. The rows of the next
    request would not be aligned in memory."""
    for request in islice(requests, GATHERED_REQUESTS):
        yield request
        rows -= len(request.samples)
        if rows <= 0 or not fits(len(request.samples)):
            return


def _fetches_many(data: Any) -> bool:
    """Torch's Subset has `__getitems__` even if its dataset has none."""
    if type(data) is Subset:
        return _fetches_many(data.dataset)
    return getattr(data, "__getitems__", None) is not None


def _reason(samples: list[Any], error: Exception) -> str:
    """In a loader worker, torch's error may be about shared memory instead of the samples."""

    def stack(batch: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:
        return torch.stack(batch)

    try:
        collate_with(samples, collate_fn_map={**default_collate_fn_map, Tensor: stack})
    except Exception as plain:
        return str(plain)
    return str(error)


def some(indices: list[int]) -> str:
    return str(indices) if len(indices) <= 16 else f"[{', '.join(map(str, indices[:16]))}, ...]"
