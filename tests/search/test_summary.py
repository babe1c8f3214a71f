"""The results of a search as text for a terminal."""

from __future__ import annotations

import math

import pytest
from search.made_up import BEGAN, PARAMETERS, search, trial

from lockstep.recipe.parameters import Parameter
from lockstep.search.summary import (
    aligned_lines,
    failures,
    numbers,
    progress_line,
    seconds_left,
    summary_lines,
    train_command,
)


def test_the_summary_has_the_best_the_top_and_the_failures() -> None:
    results = search(
        *(
            trial(
                number,
                value=1.0 - 0.1 * number,
                values={100: 1.0},
                parameters={"lr": 0.01, "width": 64 * number},
            )
            for number in range(7)
        ),
        trial(7, "failed", reason="the loss is nan at step 12", parameters={}),
        trial(8, "pruned", value=0.01, parameters={"lr": 0.1, "width": 64}),
        trial(9, "failed", reason="the loss is nan at step 9.5e3\nand more", parameters={}),
        trial(10, value=math.nan),
        wanted=12,
        parameters=[PARAMETERS[0], Parameter(name="width", default=64, low=0, high=512)],
    )
    assert summary_lines(results) == [
        "s: train.py, minimize loss",
        "11 of 12 trials: 8 complete, 1 pruned, 2 failed",
        "best: trial 6, loss 0.4 after 100 steps in 10 s",
        "  lr     0.01",
        "  width  384",
        "",
        "trial  loss  steps  time    lr  width",
        "    6   0.4    100  10 s  0.01    384",
        "    5   0.5    100  10 s  0.01    320",
        "    4   0.6    100  10 s  0.01    256",
        "    3   0.7    100  10 s  0.01    192",
        "    2   0.8    100  10 s  0.01    128",
        "",
        "train with the best: lockstep run --set lr=0.01 --set width=384 train.py",
        "",
        "failed:",
        "  2 trials (7, 9): the loss is nan at step 12",
    ]


def test_a_search_without_a_complete_trial_says_so() -> None:
    assert summary_lines(search(wanted=3)) == [
        "s: train.py, minimize loss",
        "0 of 3 trials",
        "no trial is complete, with a finite value",
    ]
    assert "no trial is complete, with a finite value" in summary_lines(
        search(trial(0, value=math.nan))
    )


def test_the_best_has_the_finite_value_that_the_direction_asks_for() -> None:
    trials = [
        trial(0, value=math.nan),
        trial(1, value=2.0),
        trial(2, value=3.0),
        trial(3, value=-math.inf),
        trial(4, value=math.inf),
    ]
    for direction, order in (("minimize", [1, 2]), ("maximize", [2, 1])):
        results = search(*trials, direction=direction)
        assert [each.number for each in results.ranked] == order
        assert [number for _, _, number in results.best_over_time()] == (
            [1] if direction == "minimize" else [1, 2]
        )


def test_the_command_sets_what_is_searched_and_what_is_not_the_default() -> None:
    parameters = [
        PARAMETERS[0],
        Parameter(name="data", default="a"),
        Parameter(name="seed", default=0),
    ]
    found = trial(0, parameters={"lr": 3e-4, "data": "b c", "seed": 0, "other": None})
    command = (
        "lockstep run --set lr=0.0003 --set 'data=b c' --set other=None 'my train.py' --steps 5"
    )
    assert (
        train_command(search(found, parameters=parameters, script="'my train.py' --steps 5"), found)
        == command
    )


def test_failures_that_differ_in_numbers_are_one_and_the_most_frequent_is_first() -> None:
    reasons = [None, "out of memory: 3 GB", "", "out of memory: 4.5 GB", "out of memory: 1e3 GB"]
    trials = [trial(number, "failed", reason=reason) for number, reason in enumerate(reasons)]
    assert failures(search(*trials, trial(5, "pruned", reason="x"))) == [
        ("out of memory: 3 GB", [1, 3, 4]),
        ("no reason is known", [0, 2]),
    ]
    many = [trial(number, "failed", reason="x" * (number + 1)) for number in range(8)]
    assert summary_lines(search(*many))[-1] == "  3 more reasons"


def test_many_numbers_of_trials_are_short() -> None:
    assert [numbers([3]), numbers([3, 4])] == ["trial 3", "2 trials (3, 4)"]
    assert numbers(range(9)) == "9 trials (0, 1, 2, 3, 4 and 4 more)"


def test_columns_are_aligned() -> None:
    assert aligned_lines([["a", "b", "c"], ["aaa", "bbb", ""]], left=1) == [
        "a      b  c",
        "aaa  bbb",
    ]


def test_the_progress_is_one_line() -> None:
    results = search(
        trial(0, value=0.25),
        trial(1, "pruned", value=3.0),
        trial(2, "failed"),
        trial(3, "running"),
        wanted=10,
    )
    said = "3/10 trials done, 1 running, 1 pruned, 1 failed; "
    assert progress_line(results, 750.0) == f"{said}best loss 0.25 (trial 0); about 12:30 left"
    assert progress_line(results, None) == f"{said}best loss 0.25 (trial 0)"
    assert (
        progress_line(search(wanted=2), None)
        == "0/2 trials done, 0 running, 0 pruned, 0 failed; none complete"
    )


def test_the_time_left_is_estimated_from_the_trials_that_have_ended() -> None:
    ended = [trial(0, value=1.0), trial(1, "pruned", value=1.0, ended=BEGAN + 40.0)]
    running = trial(2, "running", started=BEGAN + 100.0)
    results = search(*ended, running, wanted=6)
    mean = (10.0 + 30.0) / 2
    assert seconds_left(results, parallel=2, now=BEGAN + 105.0) == pytest.approx(
        (15.0 + 3 * mean) / 2
    )
    assert seconds_left(results, parallel=100, now=BEGAN + 105.0) == pytest.approx(15.0), (
        "no less than the one that runs"
    )
    assert seconds_left(results, parallel=1, now=BEGAN + 900.0) == pytest.approx(3 * mean), (
        "one that takes longer ends soon"
    )
    assert seconds_left(search(*ended), parallel=2, now=BEGAN) is None, "all have ended"
    assert seconds_left(search(running, wanted=3), parallel=2, now=BEGAN) is None
