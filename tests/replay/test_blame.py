"""The step that is blamed, and the cause that its replays show."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from replay.test_replayed_step import OTHER, REPLAY, SAME, UNKNOWN

from lockstep.replay.blame import (
    Cause,
    cause_of,
    largest_spike,
    learning_rate_jump,
    outliers,
    spike_at,
    suspected,
    unusual_block,
)
from lockstep.replay.step import Replay, ReplayedMicrobatch

USUAL = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1]


def rows(*losses: float | None, norms: float = 2.0, lr: float = 0.1) -> list[dict[str, Any]]:
    return [
        {"step": 10 * place, "loss": loss, "gradient_norm": norms, "lr": lr}
        for place, loss in enumerate(losses, 1)
    ]


def test_the_largest_spike_is_found() -> None:
    spike = largest_spike(rows(*USUAL, 1.6, *USUAL, 3.0, *USUAL))
    assert spike is not None
    assert (spike.step, spike.metric, spike.value, spike.usual) == (160, "loss", 3.0, 1.0)


def test_the_first_of_the_steps_that_lead_to_it_is_taken() -> None:
    spike = largest_spike(rows(*USUAL, 1.6, 2.5, 9.0, 1.0, 1.0))
    assert spike is not None
    assert (spike.step, spike.value) == (80, 1.6)


def test_a_gradient_norm_that_jumps_is_a_spike_too() -> None:
    given = rows(*USUAL, 1.0)
    given[-1]["gradient_norm"] = 20.0
    spike = largest_spike(given)
    assert spike is not None
    assert (spike.step, spike.metric) == (80, "gradient_norm")


def test_the_first_value_that_is_not_finite_is_the_largest_spike() -> None:
    spike = largest_spike(rows(*USUAL, None, None))
    assert spike is not None
    assert (spike.step, spike.score) == (80, math.inf)


@pytest.mark.parametrize("losses", [USUAL, [1.0, 5.0, 1.0], [3.0, 2.0, 1.5, 1.2, 1.0, 0.9]])
def test_usual_steps_the_first_ones_and_a_falling_loss_are_no_spikes(losses: list[float]) -> None:
    assert largest_spike(rows(*losses)) is None


def test_noise_around_a_level_seldom_has_a_spike() -> None:
    noise = random.Random(0)
    runs = [rows(*(noise.gauss(1, 0.1) for _ in range(count))) for count in [20] * 200 + [100] * 20]
    assert sum(largest_spike(run) is not None for run in runs) <= 5


def test_too_few_steps_before_tell_nothing() -> None:
    assert spike_at(rows(1.0, 1.0, 9.0), 2) is None


def test_outliers_are_many_times_the_median() -> None:
    assert outliers([1.0, 1.2, 9.0, 0.8, 30.0]) == [4, 2]
    assert outliers([1.0, math.nan, 1.0]) == [1]
    assert outliers([0.0, 0.0, 1e-9]) == [2]
    assert outliers([1.0, 1.0]) == outliers([]) == []


def test_the_latest_jump_of_the_learning_rate_is_named() -> None:
    given = [*rows(1.0, 1.0), *({**row, "step": row["step"] + 20} for row in rows(1.0, lr=0.3))]
    assert learning_rate_jump(given, 30) == (30, 0.1, 0.3)
    assert learning_rate_jump(given, 20) is None
    assert learning_rate_jump(rows(1.0, 1.0), 20) is None


def test_the_block_that_has_grown_most_is_named() -> None:
    before = [{"a": 9.0, "b": 1.0}, {"a": 9.0, "b": 1.0}]
    assert unusual_block(replace(REPLAY, before=before)) == "b"
    assert unusual_block(REPLAY) == "b", "without steps before: the largest"


PARTS = [
    ReplayedMicrobatch(microbatch=place, samples=[2 * place, 2 * place + 1], squares={"a": square})
    for place, square in enumerate((1.0, 1.2, 400.0, 0.9))
]
ALIKE = [replace(each, squares={"a": 1.0}) for each in PARTS]
GONE = replace(REPLAY, on_the_way=[SAME, OTHER])
FAST = replace(REPLAY, plan="replicate=1", run_plan="replicate=2")
UNLIKE = replace(FAST, on_the_way=[replace(UNKNOWN, step=5, loss=(9.0, 1.0))])
JUMP = [*rows(1.0, 1.0), {"step": 30, "loss": 1.0, "gradient_norm": 2.0, "lr": 0.5}]
SAMPLED = replace(REPLAY, microbatches=[replace(PARTS[2], by_sample=[1.0, 399.0])])


@pytest.mark.parametrize(
    ("found", "by_sample", "later", "cause", "said"),
    [
        (
            replace(REPLAY, microbatches=PARTS),
            SAMPLED,
            None,
            "sample",
            "sample 5 of microbatch 2: 1",
        ),
        (
            replace(REPLAY, microbatches=PARTS),
            None,
            None,
            "microbatch",
            "microbatch 2 (samples 4, 5)",
        ),
        (
            replace(REPLAY, microbatches=ALIKE),
            None,
            None,
            "all alike",
            "no microbatch has an unusual",
        ),
        (GONE, None, None, "machine", "from step 5 on, this machine computes other gradients than"),
        (GONE, None, REPLAY, "once", "from step 5 on, this machine computes other gradients than"),
        (GONE, None, GONE, "machine", "from step 5 on, this machine computes other gradients than"),
        (
            UNLIKE,
            None,
            REPLAY,
            "once",
            "from step 5 on, this machine computes other gradients than",
        ),
    ],
)
def test_the_cause_is_named(
    found: Replay, by_sample: Replay | None, later: Replay | None, cause: Cause, said: str
) -> None:
    blame = cause_of(found, rows(1.0), by_sample=by_sample, later=later)
    assert blame.cause == cause
    assert blame.text.startswith(said)
    assert blame.as_json()["cause"] == cause


def test_a_learning_rate_is_blamed_only_if_no_microbatch_is() -> None:
    alike = replace(REPLAY, step=30, microbatches=ALIKE)
    assert cause_of(alike, JUMP).cause == "learning rate"
    assert cause_of(replace(alike, microbatches=PARTS), JUMP).cause == "microbatch"


def test_the_only_sample_of_a_microbatch_needs_no_second_replay() -> None:
    one = replace(REPLAY, microbatches=[replace(each, samples=[7]) for each in PARTS])
    assert cause_of(one, rows(1.0)).samples == [7]
    assert suspected(replace(REPLAY, microbatches=PARTS[:1])) == PARTS[0]


def test_what_has_changed_since_the_run_is_no_wrong_machine() -> None:
    other = replace(GONE, environment=["torch: 2.13.0, now 2.14.0"])
    blame = cause_of(other, rows(1.0))
    assert blame.cause == "changed"
    assert "not as in the run: torch: 2.13.0, now 2.14.0" in blame.text
    assert "wrong results" not in blame.text
