"""Samplers for `Recipe.sampler` and `Recipe.batch_sampler`: weighted, balanced, mixtures, batches
by length. Each sampler is a pure function of (epoch, seed)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.base.errors import RecipeError
from lockstep.keys import RandomStream, key
from lockstep.order import Order, hashed

Sampler = Callable[[int, int], NDArray[np.int64]]
BatchSampler = Callable[[int, int], list[list[NDArray[np.int64]]]]
LENGTH_GROWTH = 1.1
"""In `by_length`, the largest ratio between the lengths of the longest and the shortest sample in a
bucket. A difference of one token is always allowed."""


def weighted(
    weights: Sequence[float], *, samples: int | None = None, replacement: bool = True
) -> Sampler:
    """Draw `samples` indices per epoch, each with a probability proportional to its weight.
    `samples=None`: as many indices as there are weights. `replacement=False`: no index occurs twice
    in an epoch (Efraimidis and Spirakis, 2006). Raises `RecipeError`."""
    given = np.asarray(weights, dtype=np.float64)
    count = len(given) if samples is None else samples
    if given.ndim != 1 or not np.isfinite(given).all() or (given < 0).any() or not given.sum() > 0:
        raise RecipeError(
            "weighted(weights): it takes one weight for each sample of the dataset, finite and at"
            " least 0, and not all 0; correct them"
        )
    if count < 1 or (not replacement and count > np.count_nonzero(given)):
        raise RecipeError(
            f"weighted(samples={samples}, replacement={replacement}) with {np.count_nonzero(given)}"
            " weights above 0; an epoch has at least one sample, and without replacement at most"
            " as many as those; give another number"
        )
    bounds = np.cumsum(given) / given.sum()

    def sampler(epoch: int, seed: int) -> NDArray[np.int64]:
        if replacement:
            uniform = _uniform(count, seed, epoch)
            drawn: NDArray[np.int64] = np.searchsorted(bounds, uniform, side="right")
            last = np.flatnonzero(given)[-1]  # rounding may leave the last bound below 1
            return np.where(drawn < last, drawn, last)
        with np.errstate(divide="ignore"):
            priority = -np.log1p(-_uniform(len(given), seed, epoch)) / given
        return np.argsort(priority, kind="stable")[:count]

    return sampler


def balanced(labels: Sequence[Hashable], *, samples: int | None = None) -> Sampler:
    """Draw indices so that each label is equally likely. `labels` has one label for each sample.
    `samples` has the same meaning as in `weighted`. Raises `RecipeError`."""
    counts = Counter(labels)
    return weighted([1 / counts[label] for label in labels], samples=samples)


def mixture(sizes: Sequence[int], ratios: Sequence[float], *, samples: int) -> Sampler:
    """Mix datasets. Each epoch has `samples` samples. Each dataset provides its ratio of the
    samples, rounded to a whole number of samples. Use the sampler with a
    `torch.utils.data.ConcatDataset` of datasets of these `sizes`. Each dataset has its own shuffled
    order, which continues from epoch to epoch. Every sample of a dataset is seen once before any
    sample is seen again. Raises `RecipeError`."""
    if (
        len(sizes) != len(ratios)
        or not sizes
        or min(sizes) < 1
        or min(ratios) < 0
        or not sum(ratios) > 0
        or samples < 1
    ):
        raise RecipeError(
            f"mixture(sizes={list(sizes)}, ratios={list(ratios)}, samples={samples}); there is a"
            " ratio for each dataset, none is negative and not all are 0, and datasets and epochs"
            " are not empty; correct them"
        )
    shares = [samples * ratio / sum(ratios) for ratio in ratios]
    counts = [int(share) for share in shares]
    most_lost = sorted(range(len(shares)), key=lambda place: counts[place] - shares[place])
    for place in most_lost[: samples - sum(counts)]:
        counts[place] += 1
    starts = np.cumsum([0, *sizes[:-1]])

    def sampler(epoch: int, seed: int) -> NDArray[np.int64]:
        drawn = [
            start + _places(size, count, key(seed, RandomStream.SAMPLER, place), epoch * count)
            for place, (start, size, count) in enumerate(zip(starts, sizes, counts, strict=True))
            if count
        ]
        return np.concatenate(drawn)[_places(samples, samples, seed, epoch * samples)]

    return sampler


def by_length(lengths: Sequence[int], *, tokens: int, microbatches: int = 1) -> BatchSampler:
    """Batches of samples of similar length, for `Recipe.batch_sampler`. A microbatch, padded to its
    longest sample, has at most `tokens` tokens. A sample with more than `tokens` tokens is a
    microbatch alone.

    `lengths`: number of tokens of each sample. `microbatches`: number of microbatches in a global
    batch. An epoch's last batch may have fewer microbatches. Each epoch has every sample once. The
    grouping of samples and the order of microbatches change from epoch to epoch. Raises
    `RecipeError`.
    """
    given = np.asarray(lengths)
    if given.ndim != 1 or not given.size or given.min() < 1 or tokens < 1 or microbatches < 1:
        raise RecipeError(
            "by_length: lengths has one number of at least 1 a sample, and tokens and microbatches"
            " are at least 1; correct them"
        )
    buckets = _buckets(given)

    def sampler(epoch: int, seed: int) -> list[list[NDArray[np.int64]]]:
        made: list[NDArray[np.int64]] = []
        for number, members in enumerate(buckets):
            count, own = len(members), key(seed, RandomStream.SAMPLER, number)
            shuffled = members[_places(count, count, own, epoch * count)]
            size = max(1, tokens // int(given[members].max()))
            made += [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
        order = _places(len(made), len(made), seed, epoch * len(made)).tolist()
        return [
            [made[place] for place in order[start : start + microbatches]]
            for start in range(0, len(order), microbatches)
        ]

    return sampler


def _buckets(lengths: NDArray[Any]) -> list[NDArray[np.int64]]:
    order = np.argsort(lengths, kind="stable")
    buckets, start = [], 0
    while start < len(order):
        longest = max(int(lengths[order[start]] * LENGTH_GROWTH), int(lengths[order[start]]) + 1)
        stop = int(np.searchsorted(lengths[order], longest, side="right"))
        buckets.append(order[start:stop])
        start = stop
    return buckets


def _places(length: int, count: int, seed: int, first: int) -> NDArray[np.int64]:
    """Return the sample indices at `count` consecutive positions of an endless shuffled order."""
    return Order(length, seed).samples(np.arange(first, first + count))[1]


def _uniform(count: int, seed: int, epoch: int) -> NDArray[np.float64]:
    bits = hashed(np.arange(count), key(seed, RandomStream.SAMPLER, epoch)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
