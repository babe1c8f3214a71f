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
    spike_before_the_end,
    suspected,
    unusual_block,
)
from lockstep.replay.not_finite import NotFinite
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


def test_the_first_of_the_unusual_steps_at_the_end_is_found() -> None:
    spike = spike_before_the_end(rows(*USUAL, 99.0, *USUAL, 2.5, 9.0, 1e9))
    assert spike is not None
    assert (spike.step, spike.value) == (160, 2.5)
    assert spike_before_the_end(rows(*USUAL, 99.0, 1.0)) is None, "the last step is usual"
    assert spike_before_the_end(rows(*USUAL, 1.6)) is None, "too little for a spike"
    assert spike_before_the_end([]) is None


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


def rates(every: int, *values: float) -> list[dict[str, Any]]:
    """Rows of the first step and of each step that is a multiple of `every`."""
    steps = [1, *range(every, every * len(values), every)] if every > 1 else range(1, 999)
    return [{"step": step, "lr": rate} for step, rate in zip(steps, values, strict=False)]


def test_the_latest_jump_of_the_learning_rate_is_named() -> None:
    given = rates(10, *[0.1] * 3, *[0.3] * 9)
    for step in (30, 39, 100):
        assert learning_rate_jump(given, step) == (given[2], given[3])
    assert learning_rate_jump(given, 20) is None
    assert learning_rate_jump(given, 110) is None, "too long before the step"
    assert learning_rate_jump(given[:3], 20) is None
    again = [*given, {"step": 120, "lr": 1.0}]
    assert learning_rate_jump(again, 120) == (again[-2], again[-1])


WARM_UPS = [
    rates(10, *(1e-4 * step for step in (1, 10, 20, 30, 40, 50, 60))),
    rates(10, 1e-4, *[1e-3] * 9),
    rates(10, 1e-4, 1e-3, *[1.5e-3] * 9),
    rates(1, *(1e-4 * step for step in range(1, 9)), *[8e-4] * 9),
    rates(1, *(1e-9 + 1e-4 * step for step in range(9)), *[8e-4] * 9),
    rates(1, *(1e-8 * 3**step for step in range(11)), *[8e-4] * 9),
    rates(10, *(1 - math.cos(step / 30) for step in (1, 10, 20, 30, 40, 50, 60, 70, 80, 90))),
    rates(10, *(1 + math.cos(step / 50) for step in range(0, 150, 10))),
]
"""Linear ones, an exponential one, and cosines up and down."""


@pytest.mark.parametrize("given", WARM_UPS)
def test_a_smooth_schedule_is_no_jump(given: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in given if learning_rate_jump(given, row["step"])] == []
    last = given[-1]
    jump = {"step": last["step"] + 1, "lr": 10 * last["lr"]}
    assert learning_rate_jump([*given, jump], jump["step"]) == (last, jump)


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
    found = cause_of(alike, JUMP)
    assert found.cause == "learning rate"
    assert found.text.startswith("the learning rate: 0.1 in step 20, 0.5 in step 30; no microbatch")
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


NAN = {"a": math.nan}
IN_BATCH = NotFinite(stage="batch", samples=(2,))
IN_LAYER = NotFinite(stage="forward", layer="b", operation="Linear")


def not_finite(*places: NotFinite | None, by: int = 3) -> Replay:
    """A step of `by` microbatches of two samples, the first of which have these places."""
    given = [ReplayedMicrobatch(microbatch=n, samples=[2 * n, 2 * n + 1]) for n in range(by)]
    bad = [
        replace(each, total=math.nan, squares=NAN, places=() if place is None else (place,))
        for each, place in zip(given, places, strict=False)
    ]
    good = [replace(each, total=1.0, squares={"a": 1.0}) for each in given[len(bad) :]]
    return replace(
        REPLAY, loss=math.nan, squares={}, ended_the_run=True, microbatches=[*bad, *good]
    )


@pytest.mark.parametrize(
    ("replay", "by_sample", "cause", "microbatch", "samples", "block"),
    [
        (not_finite(None, replace(IN_BATCH)), None, "microbatch", 0, [0, 1], None),
        (not_finite(replace(IN_BATCH, samples=(1,))), None, "sample", 0, [1], None),
        (not_finite(replace(IN_LAYER, samples=(1,))), None, "sample", 0, [1], "b"),
        (not_finite(replace(IN_LAYER, samples=(0, 1))), None, "microbatch", 0, [0, 1], "b"),
        (not_finite(IN_LAYER), None, "microbatch", 0, [0, 1], "b"),
        (not_finite(IN_LAYER), [1.0, math.nan], "sample", 0, [1], "b"),
        (not_finite(IN_LAYER), [math.nan, math.nan], "microbatch", 0, [0, 1], "b"),
        (not_finite(*[IN_LAYER] * 3), None, "all alike", None, [], "b"),
        (not_finite(*[replace(IN_LAYER, samples=(1,))] * 3), None, "all alike", None, [], "b"),
        (not_finite(*[IN_BATCH] * 3), None, "sample", 0, [2, 2, 2], None),
        (not_finite(IN_LAYER, by=1), None, "all alike", None, [], "b"),
    ],
)
def test_the_cause_of_a_value_that_is_not_finite(
    replay: Replay,
    by_sample: list[float] | None,
    cause: Cause,
    microbatch: int | None,
    samples: list[int],
    block: str | None,
) -> None:
    divided = None
    if by_sample is not None:
        first = replace(replay.microbatches[0], by_sample=by_sample)
        divided = replace(replay, microbatches=[first])
    found = cause_of(replay, [], by_sample=divided)
    assert (found.cause, found.microbatch, found.block) == (cause, microbatch, block)
    assert list(found.samples) == samples
    assert "nan" not in found.text
    assert ("--without-sample" in found.text) == (cause == "sample")
    assert ("layers are looked at under replicate" in found.text) == (
        block is None and cause != "sample"
    )


def test_a_jump_of_the_learning_rate_is_blamed_if_nothing_is_finite() -> None:
    found = cause_of(replace(not_finite(*[IN_LAYER] * 3), step=31), JUMP)
    assert found.cause == "learning rate"
    assert "is in the output of layer b (Linear) in the forward" in found.text


def test_a_run_that_ended_in_a_step_that_is_finite_here_is_not_reproduced() -> None:
    found = cause_of(replace(not_finite(), loss=1.0), [])
    assert found.cause == "machine"
    assert "is not finite, and here both are; no later checkpoint tells" in found.text
    assert replace(not_finite(), loss=1.0).verdict().startswith("in the run, the loss or the")
    assert not_finite(None).verdict().startswith("as in the run, the loss or the gradient")


def test_samples_without_an_index_have_no_remedy() -> None:
    place = replace(IN_LAYER, samples=("shard 1",))
    found = cause_of(not_finite(place), [])
    assert found.cause == "sample"
    assert found.text.endswith("in the forward")
