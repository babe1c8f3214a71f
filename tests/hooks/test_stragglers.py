"""Finding the ranks that are slower than the others, and in which part of a step."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from lockstep.hooks.stragglers import (
    MIN_SECONDS,
    MIN_WINDOWS,
    PARTS,
    SLOWDOWN,
    StragglerFinder,
    slow,
)

USUAL = {"data": 0.1, "compute": 1.0, "hooks": 0.01}


def times(*ranks: Mapping[str, float]) -> Any:
    """The usual times, with the given changes on each rank."""
    return np.array([[{**USUAL, **rank}[part] for rank in ranks] for part in PARTS])


@pytest.mark.parametrize(("part", "seconds"), [("data", 0.5), ("compute", 1.3), ("hooks", 0.4)])
def test_a_slow_rank_is_named_with_the_part(part: str, seconds: float) -> None:
    (found,) = slow(times({}, {part: seconds}, {}, {}), [0] * 4)
    assert (found.rank, found.part, found.seconds) == (1, part, pytest.approx(seconds))
    assert found.usual_seconds == pytest.approx(USUAL[part])
    assert found.times > 1.1


def test_of_two_the_slower_one_is_named() -> None:
    assert [each.rank for each in slow(times({"compute": 1.3}, {}), [0, 0])] == [0]


def test_a_difference_within_a_tenth_is_not_slow() -> None:
    assert slow(times({}, {"compute": 1.05}, {"compute": 0.95}), [0] * 3) == []


def test_each_is_compared_with_the_median_of_the_others() -> None:
    rng = random.Random(0)
    for size in range(2, 9):
        seconds = [rng.choice([1.0, 1.2, 1.5, 2.0]) for _ in range(size)]
        found = {
            each.rank: each.times
            for each in slow(
                times(*({"data": 0.0, "hooks": 0.0, "compute": each} for each in seconds)),
                [0] * size,
            )
        }
        truth = [
            own / statistics.median(seconds[:rank] + seconds[rank + 1 :])
            for rank, own in enumerate(seconds)
        ]
        assert found == {
            rank: pytest.approx(factor) for rank, factor in enumerate(truth) if factor > SLOWDOWN
        }


def test_the_time_for_each_rank_does_not_grow_with_their_number() -> None:
    found = slow(times(*[{}] * 20_000, {"compute": 2.0}), [0] * 20_001)  # n * n would be minutes
    assert [each.rank for each in found] == [20_000]


def test_stages_of_a_pipeline_do_not_do_the_same_work() -> None:
    assert [
        each.rank for each in slow(times({}, {}, {"compute": 3.0}, {"compute": 4.5}), [0, 0, 1, 1])
    ] == [3]
    assert slow(times({}, {"compute": 3.0}), [0, 1]) == []


def test_a_straggler_is_reported_once_after_a_minimum_time() -> None:
    stragglers, reported = StragglerFinder([0, 0]), []
    for _ in range(20):
        reported.append([each.rank for each in stragglers.add(times({}, {"compute": 1.5}), 4.0)])
    first = max(MIN_WINDOWS, -(-int(MIN_SECONDS) // 4)) - 1
    assert reported == [[]] * first + [[1]] + [[]] * (19 - first)


def test_a_rank_that_recovers_may_be_reported_again() -> None:
    stragglers = StragglerFinder([0, 0])
    reported = [
        bool(stragglers.add(times({}, {"compute": 2.0 if slow_now else 1.0}), 5.0))
        for slow_now in [True] * 6 + [False] * 6 + [True] * 6
    ]
    assert reported.count(True) == 2


@pytest.mark.parametrize("seed", range(50))
def test_a_short_delay_and_an_irregular_pace_are_not_reported(seed: int) -> None:
    rng, stragglers = random.Random(seed), StragglerFinder([0] * 4)
    for number in range(200):
        ranks = [
            {"data": rng.uniform(0.05, 0.15), "compute": rng.uniform(0.8, 1.2)} for _ in range(4)
        ]
        if number == 100:
            ranks[2] = {"compute": 1.5}
        assert stragglers.add(times(*ranks), 0.5) == []
