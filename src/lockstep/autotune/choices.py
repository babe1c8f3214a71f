"""Which settings a recipe and a plan leave to measurement may be, and which of them is chosen. Pure: from values to values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
REFERENCE = 8
"""Samples of the microbatch with which the rest is timed, where the microbatch itself is yet to be chosen."""
WORTH = {"precision": 1.1, "threads": 1.03, "microbatch": 1.03}
"""So many times as fast another choice must be than the one that is preferred to it."""
CHEAP = 0.05
"""Fetching that takes no more than this share of computing stays in the training process."""
SPARE = 1.25
"""So much more than the mean time of fetching is made room for."""
PREFETCH = 2
"""Microbatches that a loader process makes ahead where fetching takes equally long each time."""
MOST_PREFETCH = 8


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself, which is at least 1: sizes of microbatches, or numbers of threads."""
    return [2**power for power in range((most - 1).bit_length())] + [most]


def in_turn(sizes: Sequence[int], known: int) -> list[int]:
    """In which order sizes of microbatches are timed: `known`, then larger ones, which are faster where a call is dear, then smaller."""
    return sorted(sizes, key=lambda size: (size < known, abs(size - known)))


def preferred(candidates: Sequence[T], seconds: Mapping[T, float], worth: float) -> T:
    """The first of the `candidates` that none is more than `worth` times as fast as.

    `seconds`: of those that could be measured; where none could, the first candidate.
    """
    fastest = min(seconds.values(), default=math.inf)
    return next((each for each in candidates if each in seconds and seconds[each] <= worth * fastest), candidates[0])


def step_seconds(seconds: float, *, microbatches: int, ranks: int) -> float:
    """Of a step in which the rank with the most of `microbatches`, dealt to `ranks`, takes `seconds` for each."""
    return seconds * -(-microbatches // ranks)


def loader_workers(fetch_seconds: float, compute_seconds: float, most: int) -> int:
    """Loader processes of a rank that fetches a microbatch in `fetch_seconds` and computes it in `compute_seconds`.

    0 where fetching is cheap; else as many as keep up, at most `most`.
    """
    if fetch_seconds <= CHEAP * compute_seconds:
        return 0
    return min(most, math.ceil(SPARE * fetch_seconds / compute_seconds)) if compute_seconds > 0 else most


def prefetch_depth(slowest_seconds: float, compute_seconds: float, workers: int) -> int:
    """Microbatches that each of `workers` makes ahead, so that the ones that are ready last for as long as the slowest fetch takes."""
    if not workers or compute_seconds <= 0:
        return PREFETCH
    return min(MOST_PREFETCH, max(PREFETCH, math.ceil(slowest_seconds / (compute_seconds * workers))))
