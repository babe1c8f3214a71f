"""Schedules of the learning rate: pure functions of the step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

import lockstep as ls
from lockstep.base.errors import RecipeError


def test_it_rises_in_a_line_then_falls_as_half_a_cosine_and_stays() -> None:
    schedule = ls.warmup_cosine(warmup=4, total=12, floor=0.1)
    assert [schedule(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule(8) == pytest.approx(0.55)
    assert schedule(10) == pytest.approx(0.1 + 0.9 * 0.5 * (1 - math.sqrt(0.5)))
    assert [schedule(step) for step in (12, 13, 1000)] == [0.1] * 3


def test_without_a_warmup_it_starts_at_the_top() -> None:
    assert ls.warmup_cosine(warmup=0, total=10)(0) == 1.0


def test_with_nothing_but_a_warmup_it_rises_and_stops() -> None:
    schedule = ls.warmup_cosine(warmup=2, total=2)
    assert [schedule(step) for step in range(3)] == [0.5, 1.0, 0.0]


@given(warmup=st.integers(0, 50), rest=st.integers(1, 100), floor=st.floats(0, 1))
def test_it_stays_between_the_floor_and_1_and_never_rises_after_the_warmup(
    warmup: int, rest: int, floor: float
) -> None:
    schedule = ls.warmup_cosine(warmup=warmup, total=warmup + rest, floor=floor)
    values = [schedule(step) for step in range(warmup + rest + 2)]
    assert all(0 < value <= 1 for value in values[:warmup])
    assert all(floor <= value <= 1 for value in values[warmup:])
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"warmup": 11, "total": 10},
            (
                "warmup=11 and total=10; both count steps, and 0 <= warmup <= total, with total at"
                " least 1"
            ),
        ),
        ({"warmup": -1, "total": 10}, "warmup=-1 and total=10; both count steps"),
        ({"warmup": 0, "total": 0}, "warmup=0 and total=0; both count steps"),
        (
            {"warmup": 0, "total": 10, "floor": 1.5},
            "floor=1.5; it must be a multiplier of the learning rate from 0 to 1",
        ),
        ({"warmup": 0, "total": 10, "floor": math.nan}, "floor=nan; it must be a multiplier"),
    ],
)
def test_what_makes_no_schedule_is_refused(changes: dict[str, float], text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        ls.warmup_cosine(**changes)  # type: ignore[arg-type]
    assert str(caught.value).startswith(text)
