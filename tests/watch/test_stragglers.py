"""Who is slower than the others, and in what."""

from __future__ import annotations

import random

import pytest

from lockstep.watch.stragglers import LONG_SECONDS, WINDOWS, Row, Stragglers, slow


def row(data: float = 0.1, compute: float = 1.0, hooks: float = 0.01, peer: int = 0) -> Row:
    return Row(step=2.0, data=data, compute=compute, hooks=hooks, communication=0.5, peer=peer)


@pytest.mark.parametrize(("part", "seconds"), [("data", 0.5), ("compute", 1.3), ("hooks", 0.4)])
def test_who_is_slow_is_named_with_the_part(part: str, seconds: float) -> None:
    (found,) = slow([row(), row(**{part: seconds}), row(), row()])
    assert (found.rank, found.part, found.seconds) == (1, part, pytest.approx(seconds))
    assert found.usual_seconds == pytest.approx(getattr(row(), part))
    assert found.times > 1.1


def test_of_two_the_slower_one_is_named() -> None:
    assert [each.rank for each in slow([row(compute=1.3), row()])] == [0]


def test_what_is_within_a_tenth_is_not_slow_and_waiting_is_not_work() -> None:
    assert slow([row(), row(compute=1.05), row(compute=0.95)]) == []
    assert slow([Row(5.0, 0.1, 1.0, 0.0, 4.0), Row(5.0, 0.1, 1.0, 0.0, 0.1)]) == []


def test_stages_of_a_pipeline_do_not_do_the_same_work() -> None:
    stages = [row(), row(), row(compute=3.0, peer=1), row(compute=4.5, peer=1)]
    assert [each.rank for each in slow(stages)] == [3]
    assert slow([row(), row(compute=3.0, peer=1)]) == []


def test_somebody_is_told_once_when_it_has_lasted() -> None:
    stragglers, told = Stragglers(), []
    for _ in range(20):
        told.append([each.rank for each in stragglers.look([row(), row(compute=1.5)], 4.0)])
    first = max(WINDOWS, -(-int(LONG_SECONDS) // 4)) - 1
    assert told == [[]] * first + [[1]] + [[]] * (19 - first)


def test_who_recovers_may_be_told_of_again() -> None:
    stragglers = Stragglers()
    told = [
        bool(stragglers.look([row(), row(compute=2.0 if slow_now else 1.0)], 5.0)) for slow_now in [True] * 6 + [False] * 6 + [True] * 6
    ]
    assert told.count(True) == 2


@pytest.mark.parametrize("seed", range(50))
def test_a_moment_is_not_long_and_an_odd_pace_is_not_slow(seed: int) -> None:
    rng, stragglers = random.Random(seed), Stragglers()
    for number in range(200):
        rows = [row(data=rng.uniform(0.05, 0.15), compute=rng.uniform(0.8, 1.2)) for _ in range(4)]
        if number == 100:
            rows[2] = row(compute=1.5)
        assert stragglers.look(rows, 0.5) == []
