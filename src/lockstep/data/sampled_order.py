"""The order of samples or batches that a user's sampler gives."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.base.errors import DataError
from lockstep.data.fetch import CPU
from lockstep.data.generators import PreservedGenerators, seed_generators
from lockstep.keys import RandomStream, key

Indices = NDArray[np.int64]
EPOCH_STRIDE = 2**40
"""Number of positions reserved for an epoch with a batch sampler, more than the samples of any
epoch."""
PURE = (
    "it is a function of epoch and seed alone, so that a resumed run has the same samples; draw"
    " from torch's or NumPy's default generators"
)
BATCHES = "it returns a list of global batches, each a list of microbatches, each a list of indices"


def _digest(*parts: Indices) -> str:
    return hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=8).hexdigest()


class SampleOrder(ABC):
    """The order of a user's sampler. The sample at position p of the run is number p % `stride` of
    epoch p // `stride`. Every rank creates a `SampleOrder`."""

    digest: str
    """Digest of the indices of epoch 0. Ranks compare the digest, and a resumed run compares it
    with the saved digest."""
    field: str
    wants: str
    """Text for error messages about the values that the sampler should return."""
    stride: int

    def __init__(self, sampler: Callable[[int, int], Any], seed: int, samples: int) -> None:
        self._sampler, self._seed, self._samples = sampler, seed, samples

    @abstractmethod
    def indices(self, epoch: int) -> Indices: ...

    def samples(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the epoch and the dataset index of the sample at each position of the run."""
        epochs, offsets = np.divmod(positions, np.int64(self.stride))
        chosen = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            chosen[here] = self.indices(epoch)[offsets[here]]
        return epochs, chosen

    def _sampled(self, epoch: int) -> Any:
        """Seeds the default random generators by (seed, epoch), and restores them afterwards."""
        with PreservedGenerators():
            seed_generators(key(self._seed, RandomStream.SAMPLER, epoch), CPU)
            return self._sampler(epoch, self._seed)

    def _error(self, epoch: int, what: str) -> DataError:
        return DataError(f"{self.field}({epoch}, {self._seed}) {what}")

    def _checked(self, epoch: int, given: Any) -> Indices:
        try:
            indices = np.asarray(given)
        except ValueError:
            indices = np.empty(0, dtype=object)
        if indices.ndim != 1 or not indices.size or not np.issubdtype(indices.dtype, np.integer):
            raise self._error(epoch, f"returned {_short(given)}; {self.wants}")
        if indices.min() < 0 or indices.max() >= self._samples:
            wrong = next(int(index) for index in indices if not 0 <= index < self._samples)
            raise self._error(
                epoch,
                f"returned the index {wrong}; the dataset has {self._samples} samples, 0 to"
                f" {self._samples - 1}",
            )
        return indices.astype(np.int64)


class SampledOrder(SampleOrder):
    field = "sampler"
    wants = "it returns the indices of an epoch's samples, in order"

    def __init__(self, sampler: Callable[[int, int], Any], seed: int, samples: int) -> None:
        super().__init__(sampler, seed, samples)
        self.epoch = lru_cache(maxsize=2)(self._epoch)
        self.stride = 0
        self.digest = _digest(self._epoch(0))
        self._epoch(1)
        if _digest(self._epoch(0)) != self.digest:
            raise self._error(0, f"returned other indices the second time; {PURE}")

    def indices(self, epoch: int) -> Indices:
        return self.epoch(epoch)

    def _epoch(self, epoch: int) -> Indices:
        indices = self._checked(epoch, self._sampled(epoch))
        if len(indices) != (self.stride or len(indices)):
            raise self._error(
                epoch,
                f"returned {len(indices)} indices, and {self.stride} in epoch 0; a run is counted"
                " in epochs of one length",
            )
        self.stride = len(indices)
        return indices


class _Epoch(NamedTuple):
    indices: Indices
    """Indices of all microbatches, concatenated."""
    batches: list[list[tuple[int, int]]]
    """For each global batch, the range [start, stop) in `indices` of each of its microbatches."""


class BatchOrder(SampleOrder):
    field = "batch_sampler"
    wants = BATCHES
    stride = EPOCH_STRIDE

    def __init__(self, sampler: Callable[[int, int], Any], seed: int, samples: int) -> None:
        super().__init__(sampler, seed, samples)
        self.epoch = lru_cache(maxsize=2)(self._epoch)
        self.batches = self.max_microbatches = 0
        first = self._epoch(0)
        self.batches, self.max_microbatches = len(first.batches), max(map(len, first.batches))
        self.sizes = [stop - start for batch in first.batches for start, stop in batch]
        """Number of samples in each microbatch of epoch 0."""
        self.digest = _digest(
            first.indices, np.array([start for batch in first.batches for start, _ in batch])
        )
        self._epoch(1)
        again = self._epoch(0)
        if not np.array_equal(again.indices, first.indices) or again.batches != first.batches:
            raise self._error(0, f"returned other batches the second time; {PURE}")

    def span(self, step: int) -> tuple[int, int]:
        """Return the positions [start, stop) of a step's global batch."""
        epoch, batch = divmod(step, self.batches)
        spans = self.epoch(epoch).batches[batch]
        return epoch * EPOCH_STRIDE + spans[0][0], epoch * EPOCH_STRIDE + spans[-1][1]

    def microbatches(self, step: int) -> list[tuple[int, int]]:
        """Return the range [start, stop) of each microbatch, counted from the first sample of the
        step's global batch."""
        epoch, batch = divmod(step, self.batches)
        spans = self.epoch(epoch).batches[batch]
        return [(start - spans[0][0], stop - spans[0][0]) for start, stop in spans]

    def indices(self, epoch: int) -> Indices:
        return self.epoch(epoch).indices

    def _epoch(self, epoch: int) -> _Epoch:
        given = list(self._sampled(epoch))
        if not given or not all(isinstance(batch, Sequence) and len(batch) for batch in given):
            raise self._error(epoch, f"returned {_short(given)}; {BATCHES}")
        parts = [[self._checked(epoch, each) for each in batch] for batch in given]
        most = max(map(len, parts))
        if self.batches and (len(parts) != self.batches or most > self.max_microbatches):
            raise self._error(
                epoch,
                f"returned {len(parts)} batches of up to {most} microbatches, and {self.batches} of"
                f" up to {self.max_microbatches} in epoch 0; a run is counted in epochs of one"
                " length; make the batches once, and shuffle them in each epoch",
            )
        bounds = list(
            pairwise(accumulate((len(each) for batch in parts for each in batch), initial=0))
        )
        remaining = iter(bounds)
        return _Epoch(
            np.concatenate([each for batch in parts for each in batch]),
            [[next(remaining) for _ in batch] for batch in parts],
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def order_of(
    sampler: Callable[[int, int], Any] | None,
    batch_sampler: Callable[[int, int], Any] | None,
    *,
    seed: int,
    samples: int,
) -> SampleOrder | None:
    if sampler is not None:
        return SampledOrder(sampler, seed, samples)
    return None if batch_sampler is None else BatchOrder(batch_sampler, seed, samples)
