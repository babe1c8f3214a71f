"""What has become of a trial, by what its processes left behind; and when failures are the
script's."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch.failures import Ending, FailureRecord, WorkerFailure
from lockstep.search.fork_server import LaunchEnding
from lockstep.search.outcome import FailuresAlike, TrialOutcome, finished_outcome, outcome_of


def result(folder: Path, metrics: dict[str, float | None], loss: float | None = 0.5) -> None:
    (folder / "result.json").write_text(json.dumps({"metrics": metrics, "loss": loss, "steps": 40}))


def ending(folder: Path, **fields: Any) -> None:
    (folder / "ending.json").write_text(
        json.dumps(asdict(LaunchEnding(**{"status": 1, "report": "", **fields})))
    )


def events(folder: Path, *told: dict[str, Any]) -> None:
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in told))


@pytest.mark.parametrize(
    ("metrics", "loss", "metric", "expected"),
    [
        ({"loss": 0.25}, 0.5, "loss", TrialOutcome(state="complete", value=0.25)),
        (
            {"accuracy": 0.9, "loss": 0.25},
            0.5,
            "accuracy",
            TrialOutcome(state="complete", value=0.9),
        ),
        ({}, 0.5, "loss", TrialOutcome(state="complete", value=0.5, steps=40)),
        ({}, None, "loss", TrialOutcome(state="failed", reason="loss is not finite")),
        ({"loss": None}, 0.5, "loss", TrialOutcome(state="failed", reason="loss is not finite")),
        (
            {"loss": math.inf},
            0.5,
            "loss",
            TrialOutcome(state="failed", reason="loss is not finite"),
        ),
        ({"accuracy": 0.9}, 0.5, "loss", TrialOutcome(state="failed", reason="loss is not finite")),
    ],
)
def test_a_run_that_has_ended_has_the_metric_of_its_last_evaluation(
    tmp_path: Path, metrics: Any, loss: Any, metric: str, expected: TrialOutcome
) -> None:
    result(tmp_path, metrics, loss)
    assert finished_outcome(tmp_path, metric) == outcome_of(tmp_path, 0, metric) == expected


def test_a_run_that_was_stopped_as_pruned_is_pruned_and_by_anything_else_it_is_complete(
    tmp_path: Path,
) -> None:
    result(tmp_path, {"loss": 2.0})
    events(tmp_path, {"event": "stopped", "reason": "the end of its generation"})
    assert finished_outcome(tmp_path, "loss") == TrialOutcome(state="complete", value=2.0)
    events(
        tmp_path,
        {"event": "run-started"},
        {"event": "stopped", "reason": "pruned: loss 2 after step 5"},
    )
    assert finished_outcome(tmp_path, "loss") == TrialOutcome(
        state="pruned", value=2.0, reason="loss 2 after step 5"
    )


def test_a_run_without_a_result_has_not_ended(tmp_path: Path) -> None:
    assert finished_outcome(tmp_path, "loss") is None
    (tmp_path / "result.json").write_text("{")
    assert finished_outcome(tmp_path, "loss") is None
    assert outcome_of(tmp_path, 0, "loss") == TrialOutcome(
        state="failed", reason="the script ended and did not train", alike="did not train"
    )


def test_one_that_has_saved_and_ended_is_to_be_resumed(tmp_path: Path) -> None:
    ending(tmp_path, status=75, report="saved and ended")
    assert outcome_of(tmp_path, 75, "loss") == TrialOutcome(state="running")


@pytest.mark.parametrize(
    ("status", "fields", "reason"),
    [
        (
            137,
            {"report": "rank 0 was killed by SIGKILL (often ...)"},
            "rank 0 was killed by SIGKILL (often ...)",
        ),
        (
            76,
            {"kind": "lockstep.base.errors:HangError", "message": "no step for 5 s\nrank 0"},
            "HangError: no step for 5 s",
        ),
        (1, {"kind": "builtins:MemoryError", "message": "", "where": "File x"}, "MemoryError: "),
        (
            1,
            {"kind": "torch:OutOfMemoryError", "message": "CUDA out of memory"},
            "OutOfMemoryError: CUDA out of memory",
        ),
        (
            2,
            {"kind": "lockstep.base.errors:LossError", "message": "the loss is nan"},
            "LossError: the loss is nan",
        ),
    ],
)
def test_what_may_come_from_its_values_is_its_own_failure(
    tmp_path: Path, status: int, fields: Any, reason: str
) -> None:
    ending(tmp_path, status=status, **fields)
    assert outcome_of(tmp_path, status, "loss") == TrialOutcome(state="failed", reason=reason)


def test_other_failures_are_alike_if_their_kind_and_place_are(tmp_path: Path) -> None:
    def alike(status: int = 1, **fields: Any) -> str | None:
        ending(
            tmp_path,
            **{
                "status": status,
                "kind": "builtins:ValueError",
                "message": "lr 0.5",
                "where": "line 3",
                **fields,
            },
        )
        outcome = outcome_of(tmp_path, status, "loss")
        assert outcome.state == "failed"
        return outcome.alike

    assert alike() == alike(message="lr 0.7")
    assert (
        len(
            {alike(), alike(where="line 4"), alike(kind="builtins:KeyError"), alike(status=3), None}
        )
        == 5
    )
    (tmp_path / "ending.json").unlink()
    assert outcome_of(tmp_path, -9, "loss") == TrialOutcome(
        state="failed", reason="its launcher was killed by signal 9", alike="signal 9"
    )


@pytest.mark.parametrize(
    ("kind", "is_mistake"),
    [("RecipeError", True), ("PlanError", True), ("LaunchError", True), ("DataError", False)],
)
def test_what_lockstep_refuses_is_a_mistake(tmp_path: Path, kind: str, is_mistake: bool) -> None:
    ending(tmp_path, status=2, kind=f"lockstep.base.errors:{kind}", message="wrong; correct it")
    outcome = outcome_of(tmp_path, 2, "loss")
    assert (outcome.is_mistake, outcome.reason) == (is_mistake, f"{kind}: wrong; correct it")


def test_the_report_of_a_crash_in_native_code_ends_without_its_colon(tmp_path: Path) -> None:
    ending(
        tmp_path,
        status=139,
        report="rank 0 was killed by SIGSEGV (a crash in native code):\n  File x",
    )
    assert (
        outcome_of(tmp_path, 139, "loss").reason
        == "rank 0 was killed by SIGSEGV (a crash in native code)"
    )


def test_the_first_failure_is_kept_with_the_last_line_of_its_traceback() -> None:
    text = (
        'Traceback:\n  File "a.py", line 1, in <module>\n    f()\n  File "a.py", line 3, in f\n   '
        " raise ValueError(1)\nValueError: 1\n"
    )
    record = FailureRecord(
        time=2.0,
        status=1,
        kind="builtins:ValueError",
        message="1",
        traceback=text,
        user_error=False,
        peer_lost=False,
    )
    found = LaunchEnding.of(
        Ending(failures=[WorkerFailure(rank=1, time=2.0, returncode=1, record=record)])
    )
    assert (found.status, found.kind, found.message, found.where) == (
        1,
        "builtins:ValueError",
        "1",
        'File "a.py", line 3, in f',
    )
    killed = LaunchEnding.of(Ending(failures=[WorkerFailure(rank=0, time=2.0, returncode=-9)]))
    assert (killed.status, killed.kind, killed.where) == (137, "", "")
    assert killed.report.startswith("rank 0 was killed by SIGKILL")
    assert LaunchEnding.of(Ending(finished=[0])) == LaunchEnding(status=0, report="")


FAILED = TrialOutcome(state="failed", reason="r", alike="a")
OTHER = TrialOutcome(state="failed", reason="r", alike="b")
OWN = TrialOutcome(state="failed", reason="r")
COMPLETE = TrialOutcome(state="complete", value=1.0)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([FAILED, FAILED, FAILED], [False, False, True]),
        ([FAILED, OTHER, FAILED, OTHER, OWN, FAILED], [False, False, False, False, False, True]),
        ([OWN] * 5, [False] * 5),
        ([COMPLETE, *[FAILED] * 4], [False] * 5),
        ([FAILED, FAILED, TrialOutcome(state="pruned"), *[FAILED] * 4], [False] * 7),
        ([TrialOutcome(state="running"), FAILED, FAILED, FAILED], [False, False, False, True]),
    ],
)
def test_the_script_is_at_fault_after_three_failures_alike_and_no_success(
    outcomes: list[TrialOutcome], expected: list[bool]
) -> None:
    alike = FailuresAlike()
    assert [alike.note(outcome) for outcome in outcomes] == expected
