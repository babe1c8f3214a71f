"""The order of samples or batches that a user's sampler gives: a pure function of (epoch, seed)."""

from __future__ import annotations

import hashlib
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
"""Positions of an epoch of batches, more than it has samples."""


class _Sampler:
    """A user's sampler, called with the default generators seeded by (seed, epoch)."""

    def __init__(self, name: str, sampler: Callable[[int, int], Any], seed: int) -> None:
        self.name = name
        self._sampler = sampler
        self._seed = seed

    def __call__(self, epoch: int) -> Any:
        with PreservedGenerators():
            seed_generators(key(self._seed, RandomStream.SAMPLER, epoch), CPU)
            return self._sampler(epoch, self._seed)

    def error(self, epoch: int, what: str) -> DataError:
        return DataError(f"{self.name}({epoch}, {self._seed}) {what}")


def _digest(*parts: Indices) -> str:
    return hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=8).hexdigest()


class SampledOrder:
    """The order of `Recipe.sampler` for so many `samples`: position p is place p % length of epoch
    p // length. Every rank makes one. Raises `DataError`."""

    def __init__(self, sampler: Callable[[int, int], Any], seed: int, samples: int) -> None:
        self._sampler = _Sampler("sampler", sampler, seed)
        self._samples = samples
        self.epoch = lru_cache(maxsize=2)(self._epoch)
        self.length = 0
        self.digest = _digest(self._epoch(0))
        self._epoch(1)
        if _digest(self._epoch(0)) != self.digest:
            raise self._sampler.error(0, f"returned other indices the second time; {PURE}")

    def samples(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the epoch and the sample of each position."""
        epochs, places = np.divmod(positions, np.int64(self.length))
        found = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            found[chosen] = self.epoch(epoch)[places[chosen]]
        return epochs, found

    def _epoch(self, epoch: int) -> Indices:
        indices = _indices(self._sampler, epoch, self._sampler(epoch), self._samples)
        if len(indices) != (self.length or len(indices)):
            raise self._sampler.error(
                epoch,
                f"returned {len(indices)} indices, and {self.length} in epoch 0; a run is counted"
                " in epochs of one length",
            )
        self.length = len(indices)
        return indices


class _Epoch(NamedTuple):
    """The batches of one epoch."""

    indices: Indices
    """All microbatches, one after another."""
    batches: list[list[tuple[int, int]]]
    """Spans of the microbatches in `indices`, by batch."""


class BatchOrder:
    """The batches of `Recipe.batch_sampler` for so many `samples`: position p is place p %
    EPOCH_STRIDE of epoch p // EPOCH_STRIDE. Every rank makes one. Raises `DataError`."""

    def __init__(self, sampler: Callable[[int, int], Any], seed: int, samples: int) -> None:
        self._sampler = _Sampler("batch_sampler", sampler, seed)
        self._samples = samples
        self.epoch = lru_cache(maxsize=2)(self._epoch)
        self.batches = self.max_microbatches = 0
        first = self._epoch(0)
        self.batches, self.max_microbatches = len(first.batches), max(map(len, first.batches))
        self.sizes = [stop - start for batch in first.batches for start, stop in batch]
        """Samples of each microbatch of epoch 0."""
        self.digest = _digest(
            first.indices, np.array([start for batch in first.batches for start, _ in batch])
        )
        self._epoch(1)
        again = self._epoch(0)
        if not np.array_equal(again.indices, first.indices) or again.batches != first.batches:
            raise self._sampler.error(0, f"returned other batches the second time; {PURE}")

    def span(self, step: int) -> tuple[int, int]:
        """Return the positions of a step's global batch."""
        epoch, batch = divmod(step, self.batches)
        spans = self.epoch(epoch).batches[batch]
        return epoch * EPOCH_STRIDE + spans[0][0], epoch * EPOCH_STRIDE + spans[-1][1]

    def microbatches(self, step: int) -> list[tuple[int, int]]:
        """Return the span of each microbatch in a step's global batch."""
        epoch, batch = divmod(step, self.batches)
        spans = self.epoch(epoch).batches[batch]
        return [(start - spans[0][0], stop - spans[0][0]) for start, stop in spans]

    def samples(self, positions: Indices) -> tuple[Indices, Indices]:
        epochs, places = np.divmod(positions, np.int64(EPOCH_STRIDE))
        found = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            found[chosen] = self.epoch(epoch).indices[places[chosen]]
        return epochs, found

    def _epoch(self, epoch: int) -> _Epoch:
        given = list(self._sampler(epoch))
        if not given or not all(isinstance(batch, Sequence) and len(batch) for batch in given):
            raise self._sampler.error(epoch, f"returned {_short(given)}; {BATCHES}")
        parts = [
            [_indices(self._sampler, epoch, each, self._samples) for each in batch]
            for batch in given
        ]
        most = max(map(len, parts))
        if self.batches and (len(parts) != self.batches or most > self.max_microbatches):
            raise self._sampler.error(
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


PURE = (
    "it is a function of epoch and seed alone, so that a resumed run has the same samples; draw"
    " from torch's or NumPy's default generators"
)
BATCHES = "it returns a list of global batches, each a list of microbatches, each a list of indices"


def _indices(sampler: _Sampler, epoch: int, given: Any, samples: int) -> Indices:
    try:
        indices = np.asarray(given)
    except ValueError:
        indices = np.empty(0, dtype=object)
    if indices.ndim != 1 or not indices.size or not np.issubdtype(indices.dtype, np.integer):
        what = (
            BATCHES
            if sampler.name == "batch_sampler"
            else "it returns the indices of an epoch's samples, in order"
        )
        raise sampler.error(epoch, f"returned {_short(given)}; {what}")
    if indices.min() < 0 or indices.max() >= samples:
        wrong = next(int(index) for index in indices if not 0 <= index < samples)
        raise sampler.error(
            epoch,
            f"returned the index {wrong}; the dataset has {samples} samples, 0 to {samples - 1}",
        )
    return indices.astype(np.int64)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


SampleOrder = SampledOrder | BatchOrder
"""The order that a user's sampler gives, instead of `lockstep.order.Order`."""


def order_of(
    sampler: Callable[[int, int], Any] | None,
    batch_sampler: Callable[[int, int], Any] | None,
    *,
    seed: int,
    samples: int,
) -> SampleOrder | None:
    """Return the order of a recipe's sampler; None if it has none."""
    if sampler is not None:
        return SampledOrder(sampler, seed, samples)
    return None if batch_sampler is None else BatchOrder(batch_sampler, seed, samples)
