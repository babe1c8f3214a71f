"""A resumed run, and one on another number of processes, are held against the run that they should
equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from audit.given_records import backward, causes, given, only, passes, row, sketched, step
from hypothesis import given as drawn, settings, strategies as st

from lockstep.audit.checks.reruns import check_compare, check_resumed
from lockstep.audit.finding import AreaResult, Cause
from lockstep.audit.records import Records
from lockstep.evidence.rows import Row

W = np.array([0.0, 0.0, 3.0, 0.0])

# Resume


def run(first: int, last: int, *, draws: str = "", **changes: Any) -> list[Row]:
    """A rank that takes the steps from `first` to `last`, each on one batch of four samples, and
    counts from 0."""
    begin, *_ = passes([])
    rows = [begin]
    for number, index in enumerate(range(first, last)):
        samples = list(range(4 * index, 4 * index + 4))
        rows.append(
            {
                "kind": "batch",
                "loader": 0,
                "number": 0,
                "indices": samples,
                "samples": [],
                "grad": True,
            }
        )
        rows.append(backward(number, state_at_batch=f"{index}", state=f"{index}{draws}"))
        before, after = sketched(W * (index + 1)), sketched(W * (index + 2))
        states = {
            "before": {"w": before},
            "parameters": {"w": after},
            "states_before": {"w/m": before},
            "states": {"w/m": after},
        }
        rows.append(step(number, added={str(number): {}}, lr=[1 / (index + 1)], **states))
    return rows + changes.get("more", [])


def resumed(rows: Sequence[Row], *, draws: str = "") -> AreaResult:
    return check_resumed(
        given(run(0, 6, draws=draws)), given(run(0, 3, draws=draws)), given(rows), 3
    )


LOAD = row("load", "train.py:7")


def test_a_run_that_goes_on_where_it_was_interrupted_is_right() -> None:
    for draws in ("", "+"):
        result = resumed([LOAD, *run(3, 6, draws=draws)], draws=draws)
        assert not result.findings
        assert result.right == "the script goes on after step 3 as the run without interruption did"


def change(rows: Sequence[Row], kind: str, **changes: Any) -> list[Row]:
    """The rows with the first of a kind changed."""
    place = next(number for number, each in enumerate(rows) if each["kind"] == kind)
    return [{**each, **changes} if number == place else each for number, each in enumerate(rows)]


@pytest.mark.parametrize(
    ("kind", "changes", "cause", "line", "text"),
    [
        (
            "step",
            {"before": {"w": sketched(W)}},
            Cause.RESUME_MODEL,
            "train.py:7",
            "before step 3 w is another one",
        ),
        (
            "step",
            {"states_before": {}},
            Cause.RESUME_OPTIMIZER,
            "train.py:7",
            "the optimizer's w/m is missing",
        ),
        (
            "step",
            {"states_before": {"w/m": sketched(W)}},
            Cause.RESUME_OPTIMIZER,
            "train.py:7",
            "the optimizer's w/m is another one",
        ),
        (
            "step",
            {"lr": [1.0]},
            Cause.RESUME_SCHEDULE,
            "train.py:7",
            "step 3 is 0.25 without interruption, 1.0 resumed",
        ),
        (
            "batch",
            {"indices": [0, 1, 2, 12]},
            Cause.RESUME_DATA,
            "train.py:12",
            "of the 4 samples of step 3 the resumed script has 1",
        ),
        (
            "backward",
            {"state": "other"},
            Cause.RESUME_RANDOM,
            "train.py:7",
            "the forward of step 3 drew other random numbers",
        ),
    ],
)
def test_what_is_not_restored_is_found(
    kind: str, changes: Row, cause: Cause, line: str, text: str
) -> None:
    finding = only(resumed([LOAD, *change(run(3, 6, draws="+"), kind, **changes)], draws="+"))
    assert (finding.cause, finding.line, finding.step) == (cause, line, 3)
    assert text in finding.evidence


def test_a_schedule_that_is_not_restored_shows_in_a_later_step() -> None:
    rows = run(3, 6)
    rows[-1]["lr"] = [1.0]
    assert (only(resumed(rows)).cause, only(resumed(rows)).step) == (Cause.RESUME_SCHEDULE, 5)


def test_without_a_seed_other_samples_prove_nothing() -> None:
    whole = given(change(run(0, 6), "batch", indices=[50, 51, 52, 53]))
    result = check_resumed(
        whole, given(run(0, 3)), given(change(run(3, 6), "batch", indices=[0, 1, 2, 3])), 3
    )
    assert not result.findings
    assert result.unseen == [
        "each start of the script has other samples (no seed): whether a resume repeats some cannot"
        " be seen"
    ]


def test_a_resumed_script_that_takes_no_step_is_not_seen() -> None:
    assert resumed([LOAD]).unseen == [
        "the resumed script took no step; it may have been at its end already"
    ]


# Other numbers of processes


def learned(
    *values: float, shift: float = 0.0, ranks: int = 1, samples: Sequence[int] = range(8)
) -> Records:
    """Steps after each of which the parameter has a value, with this gradient."""
    by_rank = []
    for rank in range(ranks):
        rows: list[Row] = []
        for index, value in enumerate(values):
            rows.append(
                {
                    "kind": "batch",
                    "loader": 0,
                    "number": 0,
                    "samples": [str(each) for each in samples[rank::ranks]],
                }
            )
            rows.append(backward(index))
            sketches = {
                "applied": {"w": sketched(W * value)},
                "parameters": {"w": sketched(W * value * (1 + shift))},
            }
            rows.append(step(index, added={str(index): {}}, **sketches))
        by_rank.append(rows)
    return given(*by_rank)


PERTURBED = [learned(1.0, 1.0, shift=1e-7)]


def compared(other: Records, likely: str = "") -> AreaResult:
    return check_compare(learned(1.0, 1.0), PERTURBED, {2: other}, likely)


def test_the_same_learning_on_more_processes_is_right() -> None:
    result = compared(learned(1.0, 1.0, ranks=2))
    assert not result.findings
    assert result.right.startswith("2 steps on 2 processes are those of one process")


def test_a_gradient_that_depends_on_the_processes_is_found_at_its_first_step() -> None:
    finding = only(compared(learned(1.0, 1.25, ranks=2), likely="; it is the scale"))
    assert (finding.cause, finding.line, finding.step, list(finding.names)) == (
        Cause.DEPENDS_ON_PROCESSES,
        "train.py:20",
        1,
        ["w"],
    )
    assert (
        "on 2 processes, step 1: the gradient of w is off by 0.25 of its size" in finding.evidence
    )
    assert finding.evidence.endswith("the samples are the same; it is the scale")


def test_a_parameter_that_depends_on_the_processes_is_found_behind_equal_gradients() -> None:
    finding = only(compared(learned(1.0, 1.0, shift=0.1, ranks=2)))
    assert "step 0: the parameter of w is off by 0.1" in finding.evidence


def test_other_samples_are_said() -> None:
    finding = only(compared(learned(2.0, 1.0, ranks=2, samples=range(8, 16))))
    assert finding.evidence.endswith(
        "the samples are others: the order of the data depends on the number of processes"
    )


@settings(max_examples=20)
@drawn(st.floats(1e-9, 1e-3))
def test_as_much_as_rounding_does_is_no_difference(noise: float) -> None:
    perturbed = [learned(1.0, 1.0 + noise, shift=noise)]
    assert not check_compare(
        learned(1.0, 1.0), perturbed, {2: learned(1.0, 1.0 - noise, ranks=2)}, ""
    ).findings
    far = check_compare(
        learned(1.0, 1.0), perturbed, {2: learned(1.0, 1.0 + 1000 * noise + 1e-3, ranks=2)}, ""
    )
    assert causes(far) == {Cause.DEPENDS_ON_PROCESSES}


def test_runs_without_steps_are_not_compared() -> None:
    assert compared(given([], [])).unseen == ["not all runs took a step"]
