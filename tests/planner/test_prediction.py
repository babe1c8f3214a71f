"""A prediction as a value, and the arithmetic from a step to days, cost and goodput."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st

from lockstep.planner.forecast import Budget, budget
from lockstep.planner.prediction import MARGIN, Prediction, Skewed
from lockstep.planner.trace import Peak

NAMES = st.text(st.characters(codec="ascii", categories=["Ll"]), min_size=1, max_size=5)
SECONDS = st.floats(0, 1e6)
BYTES = st.integers(0, 10**13)
MEMORY = st.builds(
    Peak,
    rank=st.integers(0, 10**5),
    bytes=BYTES,
    by_cause=st.dictionaries(NAMES, BYTES),
    moment=st.text(max_size=9),
)


def prediction(**changes: Any) -> Prediction:
    given: dict[str, Any] = {
        "plan": "shard=8",
        "microbatch": 4,
        "microbatches": 2,
        "seconds": 1.0,
        "by_limit": {"matmul": 0.7, "memory": 0.3},
        "seconds_with_twice": {"arithmetic": 0.65, "memory": 0.85, "network": 1.0},
        "samples": 64,
        "tokens": 65536.0,
        "steps": 100,
        "memory": [Peak(rank=0, bytes=60, by_cause={"parameters": 60}, moment="the forward")],
        "capacity_bytes": 80,
    }
    return Prediction(**{**given, **changes})


@given(
    st.builds(
        Prediction,
        plan=st.text(max_size=9),
        microbatch=st.integers(1, 99),
        microbatches=st.integers(1, 99),
        seconds=SECONDS,
        by_limit=st.dictionaries(NAMES, SECONDS, min_size=1),
        seconds_with_twice=st.dictionaries(NAMES, SECONDS),
        samples=st.integers(1, 10**6),
        tokens=st.none() | SECONDS,
        steps=st.none() | st.integers(1, 10**6),
        memory=st.lists(MEMORY, min_size=1, max_size=3),
        capacity_bytes=st.none() | BYTES,
        overhead_bytes=BYTES,
        sent_bytes=st.dictionaries(NAMES, BYTES),
        skewed=st.none() | st.builds(Skewed, seconds=SECONDS, peak_bytes=BYTES),
        note=st.none() | st.text(max_size=9),
    )
)
def test_a_prediction_is_the_same_after_a_way_through_json(given: Prediction) -> None:
    assert Prediction.from_json(json.loads(json.dumps(given.as_json()))) == given


def test_the_json_says_what_follows_too() -> None:
    told = prediction().as_json()
    assert (told["fits"], told["limit"], told["needed_bytes"]) == (True, "matmul", 66)


@given(st.integers(1, 10**12), st.integers(0, 10**10))
def test_a_plan_fits_if_a_margin_of_the_memory_is_left_free(most: int, overhead: int) -> None:
    memory = [
        Peak(rank=0, bytes=most, by_cause={}, moment=""),
        Peak(rank=7, bytes=most // 2, by_cause={}, moment=""),
    ]
    needed = prediction(memory=memory, overhead_bytes=overhead).needed_bytes
    assert needed * (1 - MARGIN) >= (most + overhead) * (1 - 1e-12)
    assert (needed - 1) * (1 - MARGIN) <= (most + overhead) * (1 + 1e-12)
    assert prediction(memory=memory, overhead_bytes=overhead, capacity_bytes=needed).fits
    assert not prediction(memory=memory, overhead_bytes=overhead, capacity_bytes=needed - 1).fits


def test_a_plan_fits_a_device_whose_memory_nobody_asks_for() -> None:
    assert prediction(capacity_bytes=None).fits


def test_the_peak_is_that_of_the_rank_that_needs_most() -> None:
    ranks = [
        Peak(rank=rank, bytes=size, by_cause={}, moment="")
        for rank, size in ((0, 5), (4, 9), (12, 7))
    ]
    assert prediction(memory=ranks).peak.rank == 4


# Days, cost and goodput


def budget_of(**changes: Any) -> Budget:
    given: dict[str, Any] = {
        "steps": 1000,
        "devices": 8,
        "price_per_hour": 2.0,
        "hours_between_failures": 50_000,
    }
    return budget(10.0, **{**given, "save_seconds": 60.0, "restart_seconds": 300.0, **changes})


def lost(interval: float, *, save: float, rate: float) -> float:
    """The part of the time that saving, and the steps since the last checkpoint, take at an
    interval."""
    return save / interval + rate * interval / 2


@given(st.floats(1, 1e3), st.integers(1, 10**5), st.floats(1e3, 1e6), st.floats(0.01, 100))
def test_no_other_interval_between_checkpoints_loses_less(
    save: float, devices: int, hours: float, factor: float
) -> None:
    """Young's interval, √(2 × save × mean time between failures)."""
    rate = devices / (hours * 3600)
    best = math.sqrt(2 * save / rate)
    goodput = 1 - lost(best, save=save, rate=rate)
    assume(goodput > 0)
    found = budget_of(
        save_seconds=save, devices=devices, hours_between_failures=hours, restart_seconds=0.0
    ).goodput
    assert found == pytest.approx(goodput)
    assert found >= 1 - lost(best * factor, save=save, rate=rate) - 1e-12


def test_a_worked_example() -> None:
    """100 devices of which each fails once in 10,000 hours: one failure in 100 h. Saving takes 72
    s: best is every 7,200 s, which loses 1 % for saving and 1 % for what is computed again;
    restarts of 3,600 s another 1 %."""
    found = budget(
        97.0,
        steps=3600,
        devices=100,
        price_per_hour=2.0,
        hours_between_failures=10_000,
        save_seconds=72.0,
        restart_seconds=3600.0,
    )
    assert found.goodput == pytest.approx(0.97)
    assert found.days == pytest.approx(100 / 24)
    assert found.device_hours == pytest.approx(100 * 100)
    assert found.cost == pytest.approx(2 * 100 * 100)


@given(st.integers(1, 10**4), st.floats(1e4, 1e6), st.floats(1, 600), st.floats(0, 3600))
def test_goodput_falls_with_devices_failures_saving_and_restarts(
    devices: int, hours: float, save: float, restart: float
) -> None:
    given: dict[str, Any] = {
        "devices": devices,
        "hours_between_failures": hours,
        "save_seconds": save,
        "restart_seconds": restart,
    }
    here = budget_of(**given).goodput
    assert 0 <= here < 1
    for name, factor in (
        ("devices", 2),
        ("hours_between_failures", 0.5),
        ("save_seconds", 2),
        ("restart_seconds", 2),
    ):
        assert budget_of(**{**given, name: given[name] * factor}).goodput <= here


@given(st.integers(1, 10**6), st.integers(2, 9))
def test_days_and_cost_are_in_proportion_to_the_steps(steps: int, factor: int) -> None:
    one, several = budget_of(steps=steps), budget_of(steps=steps * factor)
    assert several.days == pytest.approx(one.days * factor)
    assert several.cost == pytest.approx((one.cost or 0) * factor)
    assert several.goodput == one.goodput


def test_without_a_price_there_is_no_cost() -> None:
    assert budget_of(price_per_hour=None).cost is None


def test_a_cluster_that_fails_faster_than_it_saves_never_ends() -> None:
    found = budget_of(devices=10**6, hours_between_failures=10.0)
    assert (found.goodput, found.days) == (0, math.inf)


def test_nothing_is_lost_where_nothing_fails() -> None:
    assert budget_of(hours_between_failures=math.inf).goodput == 1


def test_saving_that_takes_no_time_loses_no_steps() -> None:
    assert budget_of(save_seconds=0.0, restart_seconds=0.0).goodput == 1
