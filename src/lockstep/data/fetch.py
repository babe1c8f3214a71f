"""A microbatch from the numbers of its samples: the same function in the training process and in a loader's worker."""

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

from lockstep.base.errors import DataError
from lockstep.base.torch_private import collate as collate_with
from lockstep.base.torch_private import default_collate_fn_map
from lockstep.data.generators import seed_generators
from lockstep.keys import RandomStream, key

CPU = torch.device("cpu")
GATHERED_BYTES = 2**20
GATHERED_REQUESTS = 16
"""Rows of a TensorDataset are copied for so many small microbatches at a time, or for those that come to so many bytes."""
ALIGNMENT_BYTES = 64
"""Where torch has its tensors start. A matrix product may have other bits where they start elsewhere."""


class Request(NamedTuple):
    """What a microbatch is made of."""

    step: int
    microbatch: int
    """Its index in the step."""
    is_dummy: bool
    """See `Span`."""
    epochs: NDArray[np.int64]
    """The epoch of each sample, of shape (samples,)."""
    samples: NDArray[np.int64]
    """Indices in the dataset, of the same shape."""

    def __str__(self) -> str:
        return f"step {self.step}, microbatch {self.microbatch}"


class Fetcher:
    """Makes microbatches of `data`: `fetcher[request]`.

    With a `seed`, the default generators are seeded before each sample by (seed, epoch, sample), before a `__getitems__` by its first
    sample, and before the user's `collate` by (seed, step, microbatch). None: they are left alone.
    """

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None, seed: int | None) -> None:
        self._data = data
        self._collate = collate
        self._length = len(data)
        tensors = type(data) is TensorDataset
        self._seed_of_samples = None if tensors else seed
        self._seed_of_collate = None if collate is None else seed
        self.seeds = self._seed_of_samples is not None or self._seed_of_collate is not None
        """Whether it seeds the default generators of the process it runs in."""
        self._make: Callable[[Request], Any] = self._one_by_one
        self.gathers = tensors and collate is None
        """Whether a batch is rows of tensors and nothing else; `gathered` is for these."""
        if self.gathers:
            self._make = self._rows
        elif _fetches_many(data):
            self._make = self._at_once

    def __getitem__(self, request: Request) -> Any:
        """The batch. Raises `DataError`, and what the dataset and `collate` raise, with a note that names the sample."""
        self.check_length(request)
        return self._make(request)

    def check_length(self, request: Request) -> None:
        """Raise `DataError` where the dataset has not the length it had."""
        if len(self._data) != self._length:
            raise DataError(
                f"the dataset has {len(self._data)} samples in {request}, and had {self._length} before; the order of a run follows from "
                "the length; give data whose len() stays the same"
            )

    def gathered(self, requests: Iterator[Request]) -> Iterator[tuple[Request, list[Tensor]]]:
        """Each request and its batch. Those of small microbatches are copied several at a time, into parts of one memory, where each part
        starts as a tensor of its own would."""
        widths = [tensor[:1].nbytes for tensor in self._data.tensors]
        rows = max(GATHERED_BYTES // max(sum(widths), 1), 1)
        while several := list(_some_requests(requests, rows, lambda size: all(size * width % ALIGNMENT_BYTES == 0 for width in widths))):
            sizes = [len(request.samples) for request in several]
            columns = [torch.split(column, sizes) for column in self._rows_at(np.concatenate([request.samples for request in several]))]
            for request, parts in zip(several, zip(*columns, strict=True), strict=True):
                self.check_length(request)
                yield request, [part.data for part in parts]  # .data: no view of the others', which may be changed in place

    def _rows(self, request: Request) -> list[Tensor]:
        return self._rows_at(request.samples)

    def _rows_at(self, samples: NDArray[np.int64]) -> list[Tensor]:
        rows = torch.from_numpy(samples)
        return [tensor.index_select(0, rows if tensor.is_cpu else rows.to(tensor.device)) for tensor in self._data.tensors]

    def _at_once(self, request: Request) -> Any:
        indices = request.samples.tolist()
        if self._seed_of_samples is not None:
            seed_generators(key(self._seed_of_samples, RandomStream.SAMPLE, int(request.epochs[0]), indices[0]), CPU)
        try:
            fetched = self._data.__getitems__(indices)
        except Exception as error:
            error.add_note(f"raised by __getitems__({some(indices)}) of {type(self._data).__qualname__} in {request}")
            raise
        if not isinstance(fetched, list):
            return fetched
        if len(fetched) != len(indices):
            raise DataError(
                f"__getitems__ of {type(self._data).__qualname__} returned a list of {len(fetched)} for {len(indices)} indices in "
                f"{request}; a list holds one item a sample, to be collated; return a tuple, a dict or a tensor for a batch made already"
            )
        return self._batch(fetched, request)

    def _one_by_one(self, request: Request) -> Any:
        data, seed = self._data, self._seed_of_samples
        samples = []
        for epoch, index in zip(request.epochs.tolist(), request.samples.tolist(), strict=True):
            if seed is not None:
                seed_generators(key(seed, RandomStream.SAMPLE, epoch, index), CPU)
            try:
                samples.append(data[index])
            except Exception as error:
                error.add_note(f"raised by sample {index} of {type(data).__qualname__} in {request}")
                raise
        return self._batch(samples, request)

    def _batch(self, samples: list[Any], request: Request) -> Any:
        said = partial(_samples, request)
        return batch_of(samples, self._collate, self._seed_of_collate, step=request.step, microbatch=request.microbatch, said=said)


def batch_of(
    samples: list[Any],
    collate: Callable[[list[Any]], Any] | None,
    seed: int | None,
    *,
    step: int,
    microbatch: int,
    said: Callable[[], str],
) -> Any:
    """The samples of a microbatch as a batch. `collate`: the user's, before which the default generators are seeded, where there is a
    `seed`; None: torch's. `said`: which samples they are. Raises `DataError`, and what `collate` raises, with a note that names them."""
    if collate is None:
        try:
            return default_collate(samples)
        except Exception as error:
            raise DataError(
                f"the samples of step {step}, microbatch {microbatch} do not make a batch: {_reason(samples, error)}; torch's default "
                "collate needs samples of one structure and shape; give Recipe.collate, a function from a list of samples to a batch "
                f"({said()})"
            ) from error
    if seed is not None:
        seed_generators(key(seed, RandomStream.COLLATE, step, microbatch), CPU)
    try:
        return collate(samples)
    except Exception as error:
        error.add_note(f"raised by collate in step {step}, microbatch {microbatch}, {said()}")
        raise


def _samples(request: Request) -> str:
    return f"samples {some(request.samples.tolist())}"


def _some_requests(requests: Iterator[Request], rows: int, fits: Callable[[int], bool]) -> Iterator[Request]:
    """At least one, at most `GATHERED_REQUESTS`, and no more once they have so many rows, or the next would not start where it must."""
    for request in islice(requests, GATHERED_REQUESTS):
        yield request
        rows -= len(request.samples)
        if rows <= 0 or not fits(len(request.samples)):
            return


def _fetches_many(data: Any) -> bool:
    """Whether `data` has a `__getitems__` of its own: torch's Subset has one, which only passes the call on."""
    if type(data) is Subset:
        return _fetches_many(data.dataset)
    return getattr(data, "__getitems__", None) is not None


def _reason(samples: list[Any], error: Exception) -> str:
    """What torch's default collate says where it cannot; in a worker, where it stacks into shared memory, it speaks of that instead."""

    def stack(batch: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:
        return torch.stack(batch)

    try:
        collate_with(samples, collate_fn_map={**default_collate_fn_map, Tensor: stack})
    except Exception as plain:
        return str(plain)
    return str(error)


def some(indices: list[int]) -> str:
    """The first of them."""
    return str(indices) if len(indices) <= 16 else f"[{', '.join(map(str, indices[:16]))}, ...]"
