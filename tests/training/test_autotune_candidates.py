"""The choice of settings from measured times: pure, in random cases."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given, strategies as st

from lockstep.autotune.candidates import (
    DEFAULT_PREFETCH,
    MAX_INLINE_FETCH,
    MAX_PREFETCH,
    doubling_sizes,
    loader_workers,
    preferred_candidate,
    prefetch_depth,
    step_seconds,
    timing_order,
)

TIMES = st.floats(1e-6, 1e3)


@given(st.integers(1, 10_000))
def test_sizes_double_up_to_the_largest(most: int) -> None:
    sizes = doubling_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert all(small < large <= 2 * small for small, large in pairwise(sizes))
    assert all(size.bit_count() == 1 for size in sizes[:-1])


def test_larger_microbatches_are_timed_before_smaller_ones() -> None:
    assert timing_order([1, 2, 4, 8, 16, 32], 8) == [8, 16, 32, 4, 2, 1]


@given(st.dictionaries(st.integers(1, 64), TIMES | st.none(), min_size=1), st.floats(1.0, 2.0))
def test_the_first_candidate_within_a_tolerance_of_the_fastest_is_chosen(
    timed: dict[int, float | None], worth: float
) -> None:
    candidates = list(timed)
    seconds = {each: value for each, value in timed.items() if value is not None}
    chosen = preferred_candidate(candidates, seconds, worth)
    if not seconds:
        assert chosen == candidates[0]
        return
    assert seconds[chosen] <= worth * min(seconds.values())
    for earlier in candidates[: candidates.index(chosen)]:
        assert earlier not in seconds or seconds[earlier] > worth * min(seconds.values())


@given(st.integers(1, 1000), st.integers(1, 64))
def test_a_step_takes_as_long_as_the_rank_with_the_most_microbatches(
    microbatches: int, ranks: int
) -> None:
    assert step_seconds(1.0, microbatches=microbatches, ranks=ranks) == max(
        len(range(rank, microbatches, ranks)) for rank in range(ranks)
    )


@given(TIMES, TIMES, st.integers(1, 64))
def test_loader_workers_keep_up_with_the_computation_up_to_the_maximum(
    fetch: float, compute: float, most: int
) -> None:
    workers = loader_workers(fetch, compute, most)
    assert 0 <= workers <= most
    assert (workers == 0) == (fetch <= MAX_INLINE_FETCH * compute)
    if 0 < workers < most:
        assert fetch / workers < compute
        assert workers == 1 or fetch * 1.25 / (workers - 1) > compute


def test_without_computation_the_maximum_of_loader_workers_is_chosen() -> None:
    assert loader_workers(1.0, 0.0, 7) == 7
    assert loader_workers(0.0, 0.0, 7) == 0


@given(TIMES, TIMES, st.integers(0, 64))
def test_the_prefetch_covers_the_slowest_fetch(
    slowest: float, compute: float, workers: int
) -> None:
    depth = prefetch_depth(slowest, compute, workers)
    assert DEFAULT_PREFETCH <= depth <= MAX_PREFETCH
    if workers and depth < MAX_PREFETCH:
        assert depth * workers * compute >= slowest or math.isclose(
            depth * workers * compute, slowest
        )
    if depth > DEFAULT_PREFETCH:
        assert (depth - 1) * workers * compute < slowest
