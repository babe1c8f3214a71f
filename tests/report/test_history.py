"""Curves, ranks' times and attempts of runs that were resumed, killed, or written by others; and
curves in fewer points."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lockstep.pages.chart import downsample
from lockstep.report.history import (
    Curves,
    LockHolder,
    RankTimes,
    RunEvent,
    RunHistory,
    Series,
    metric_curves,
    rank_times,
    run_events,
)


def series(pairs: dict[int, float]) -> Series:
    return Series(array("q", pairs), array("d", pairs.values()))


def run(**given: Any) -> RunHistory:
    metadata = {"recipe": {"steps": 100}, "plan": {"text": "replicate=2"}}
    nothing: dict[str, Any] = {
        "result": None,
        "curves": Curves(),
        "ranks": RankTimes(),
        "events": [],
        "holder": None,
    }
    return RunHistory(**{"name": "a", "path": "/a", "metadata": metadata, **nothing, **given})


def test_an_evaluation_and_a_logging_step_at_one_step_are_both_there() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 10, "time": 1.0, "loss": 3},
        {"step": 10, "time": 2.0, "evaluation/loss": 4},
    ]
    found = metric_curves([*rows, {"step": 20, "time": 3.0, "loss": 2}])
    assert found.series == {"loss": series({10: 3, 20: 2}), "evaluation/loss": series({10: 4})}
    assert (found.first_time, found.last_time, found.last_step) == (1.0, 3.0, 20)


def test_steps_that_were_done_again_count_once() -> None:
    steps = [10, 20, 30, 40, 25, 35]
    rows: list[dict[str, Any]] = [
        {"step": step, "time": place, "loss": place} for place, step in enumerate(steps)
    ]
    rows.insert(4, {"step": 40, "time": 3.5, "evaluation/loss": 9})
    found = metric_curves(rows)
    assert found.series["loss"] == series({10: 0, 20: 1, 25: 4, 35: 5})
    assert "evaluation/loss" not in found.series


def test_what_is_not_finite_is_what_the_row_says() -> None:
    (found,) = metric_curves(
        [{"step": 1, "time": 0.0, "loss": None, "not_finite": {"loss": "-inf"}}]
    ).series.values()
    assert found.values == array("d", [-math.inf])
    assert found.finite() == []
    assert math.isnan(
        metric_curves([{"step": 1, "time": 0.0, "loss": None}]).series["loss"].values[0]
    )


def test_times_of_ranks_are_joined_where_their_number_changes() -> None:
    rows = [
        {
            "step": step,
            "ranks": {"step": [0.1] * world, "data": [None] * world},
            "hosts": ["a"] * world,
        }
        for step, world in ((5, 2), (10, 2), (8, 1))
    ]
    found = rank_times(rows)
    assert found.steps == [5, 8]
    assert [len(row) for row in found.phases["step"]] == [2, 1]
    assert [len(row) for row in found.phases["compute"]] == [0, 0]
    assert math.isnan(found.phases["data"][0][0])
    assert found.hosts == ["a"]


LIVES: list[tuple[list[str], str]] = [
    ([], "unfinished"),
    (["run-started", "checkpoint-saved"], "unfinished"),
    (["run-started", "run-failed", "rescued"], "failed"),
    (["run-started", "run-failed", "rescued", "run-started", "restarted", "resumed"], "unfinished"),
    (["run-started", "preempted"], "preempted"),
    (
        ["run-started", "preempted", "run-started", "resumed", "run-ended", "checkpoint-saved"],
        "ended",
    ),
]


@pytest.mark.parametrize(("kinds", "state"), LIVES)
def test_how_a_run_stands_is_what_its_last_start_came_to(kinds: list[str], state: str) -> None:
    events = [RunEvent(float(at), kind, at) for at, kind in enumerate(kinds)]
    assert run(events=events).state == state
    live = run(events=events, holder=LockHolder(1, "here", True)).state
    assert live == ("running" if state == "unfinished" else state)
    assert run(events=events, holder=LockHolder(1, "there", None)).state == state
    assert run(events=events, result={"steps": 7}).state == "ended"


def test_attempts_last_from_start_to_the_last_that_was_heard() -> None:
    kinds = [
        (1, "run-started"),
        (5, "run-failed"),
        (6, "rescued"),
        (9, "run-started"),
        (10, "resumed"),
    ]
    found = run(
        events=[RunEvent(float(at), kind, 0) for at, kind in kinds],
        curves=Curves(last_time=12.0, first_time=2.0),
    )
    assert [(each.began, each.ended, each.end) for each in found.attempts] == [
        (1, 6, "failed"),
        (9, 12, None),
    ]
    assert (found.began, found.last_time) == (1, 12)
    assert run().attempts == []
    assert run().began is None


def test_events_are_in_order_of_their_times() -> None:
    rows = [
        {"time": 2.0, "event": "run-ended", "step": 3},
        {"time": 1.0, "event": "run-started", "step": 0, "plan": "p"},
    ]
    assert run_events(rows) == [
        RunEvent(1.0, "run-started", 0, {"plan": "p"}),
        RunEvent(2.0, "run-ended", 3),
    ]


VALUES = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.dictionaries(st.integers(0, 5000), VALUES, max_size=300), st.integers(1, 50))
def test_fewer_points_hide_nothing_that_stood_out(pairs: dict[int, float], columns: int) -> None:
    whole = series(dict(sorted(pairs.items())))
    points = downsample(whole, max(pairs, default=1), columns)
    assert len(points) <= columns
    assert sum(point.count for point in points) == len(pairs)
    assert sum(point.not_finite for point in points) == len(pairs) - len(whole.finite())
    for step, value in pairs.items():
        (mine,) = (point for point in points if point.first <= step <= point.last)
        assert not math.isfinite(value) or mine.low <= value <= mine.high
    seen = [value for point in points for value in (point.low, point.high) if math.isfinite(value)]
    assert not seen or (min(seen), max(seen)) == (min(whole.finite()), max(whole.finite()))


def test_few_points_stay_as_they_are() -> None:
    points = downsample(series({3: 1.5, 9: math.nan, 10: 2.0}), 10, 3)
    assert [
        (point.first, point.last, point.mean, point.low, point.high) for point in points[::2]
    ] == [
        (3, 3, *[1.5] * 3),
        (10, 10, *[2.0] * 3),
    ]
    assert points[1].not_finite == 1


def test_a_point_is_the_mean_of_its_steps() -> None:
    points = downsample(series({step: float(step) for step in range(1, 101)}), 100, 10)
    assert [point.count for point in points] == [10] * 10
    assert points[0].mean == pytest.approx(5.5)
    assert (points[-1].first, points[-1].last, points[-1].low, points[-1].high) == (
        91,
        100,
        91,
        100,
    )
