"""The candidates for each `auto` setting, and the rules that choose among them by their timings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
REFERENCE_MICROBATCH = 8
MIN_SPEEDUP = {"precision": 1.1, "threads": 1.03, "microbatch": 1.03}
"""For each setting, the smallest speedup for which a candidate replaces a preferred one."""
MAX_INLINE_FETCH = 0.05
"""If fetching takes at most this fraction of the compute time, the training process fetches its
batches itself."""
FETCH_HEADROOM = 1.25
"""The number of loader workers allows for fetches that take this many times the mean."""
DEFAULT_PREFETCH = 2
"""Microbatches that a loader worker prefetches if all fetches take the same time."""
MAX_PREFETCH = 8


def doubling_sizes(most: int) -> list[int]:
    return [2**power for power in range((most - 1).bit_length())] + [most]


def timing_order(sizes: Sequence[int], known: int) -> list[int]:
    return sorted(sizes, key=lambda size: (size < known, abs(size - known)))


def preferred_candidate(candidates: Sequence[T], seconds: Mapping[T, float], worth: float) -> T:
    """Return the first candidate that takes at most `worth` times as long as the fastest one."""
    fastest = min(seconds.values(), default=math.inf)
    return next(
        (each for each in candidates if each in seconds and seconds[each] <= worth * fastest),
        candidates[0],
    )


def step_seconds(seconds: float, *, microbatches: int, ranks: int) -> float:
    return seconds * -(-microbatches // ranks)


def loader_workers(fetch_seconds: float, compute_seconds: float, most: int) -> int:
    """Return the number of loader workers that a rank needs; 0 if fetching is cheap."""
    if fetch_seconds <= MAX_INLINE_FETCH * compute_seconds:
        return 0
    return (
        min(most, math.ceil(FETCH_HEADROOM * fetch_seconds / compute_seconds))
        if compute_seconds > 0
        else most
    )


def prefetch_depth(slowest_seconds: float, compute_seconds: float, workers: int) -> int:
    """Return the number of microbatches that each worker prefetches to hide the slowest fetch."""
    if not workers or compute_seconds <= 0:
        return DEFAULT_PREFETCH
    return min(
        MAX_PREFETCH,
        max(DEFAULT_PREFETCH, math.ceil(slowest_seconds / (compute_seconds * workers))),
    )
