"""From what ranks found to checks."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from doctor.test_machine_checks import HEALTHY

from lockstep.doctor.check_result import CheckResult
from lockstep.doctor.summary import summarize
from lockstep.launch.failures import Ending, WorkerFailure

WRONG = {"wrong": "has 1 at index 0 of 13, and must have 2"}


def row(
    collective: str = "all-reduce",
    operation: str | None = "sum",
    kind: str = "float32",
    **outcomes: Any,
) -> dict[str, Any]:
    named = {rank.removeprefix("rank"): outcome for rank, outcome in outcomes.items()}
    return {
        "collective": collective,
        "operation": operation,
        "type": kind,
        "group": "all ranks",
        "outcomes": named,
    }


def machines(count: int = 1, **changed: Any) -> list[dict[str, Any]]:
    """The last one is different."""
    infos = [replace(HEALTHY, host=f"h{number}") for number in range(count - 1)] + [
        replace(HEALTHY, host=f"h{count - 1}", **changed)
    ]
    return [{"info": asdict(each), "checks": []} for each in infos]


def summarized(
    checked: list[dict[str, Any]], ending: Ending | None = None, **more: Any
) -> list[CheckResult]:
    results = {
        "world_size": 2,
        "backend": "gloo",
        "machines": machines(),
        "checked": checked,
        "point_to_point": [],
        **more,
    }
    return [
        check
        for check in summarize(results, ending or Ending())
        if check.check not in ("the rest", "processes") or check.is_bad
    ]


def test_what_all_ranks_refuse_is_absent_and_what_one_refuses_is_wrong() -> None:
    no = {"unsupported": "Invalid scalar type"}
    checks = summarized([row(), row(kind="int16", rank0=no, rank1=no)])
    assert [(check.check, check.verdict) for check in checks] == [
        ("all-reduce", "ok"),
        ("types", "skipped"),
    ]
    assert checks[0].found == "correct in 1 type; sum"
    assert checks[1].found == "gloo does not support int16 in all-reduce"
    check, *_ = summarized([row(), row(kind="int16", rank1=no)])
    assert (check.verdict, check.found) == (
        "failed",
        "sum int16: rank 1 raised, and others did not: Invalid scalar type",
    )


def test_an_operation_that_is_refused_in_a_type_that_is_there_is_absent() -> None:
    no = {"unsupported": "no avg"}
    *_, check = summarized(
        [
            row(),
            row(operation="avg", rank0=no, rank1=no),
            row("reduce"),
            row("reduce", operation="avg", rank0=no, rank1=no),
        ]
    )
    assert (check.check, check.found) == (
        "operations",
        "gloo does not support avg of float32 in reduce, all-reduce",
    )


def test_the_first_wrong_case_stands_for_all() -> None:
    (check,) = summarized(
        [row(kind="float16", rank1=WRONG), row(kind="float32", rank0=WRONG, rank1=WRONG), row()]
    )
    assert (
        check.found
        == "sum float16: rank 1 has 1 at index 0 of 13, and must have 2; wrong in 2 of 3 cases"
    )


def test_machines_that_do_not_share_the_run_directory_are_named() -> None:
    more = {"machines": machines(2), "ranks": [0, 0, 1, 1], "world_size": 4}
    assert [
        check.verdict
        for check in summarized([], shared=[0, 1, 2, 3], **more)
        if check.check == "shared"
    ] == ["ok"]
    (check,) = [check for check in summarized([], shared=[0, 1], **more) if check.check == "shared"]
    assert (check.verdict, check.found) == ("failed", "a file that h0 writes does not appear on h1")


def test_machines_with_other_versions_and_variables_are_named() -> None:
    differs = machines(
        3, versions={"python": "3.11.2", "torch": "2.12.0"}, variables={"NCCL_ALGO": "Ring"}
    )
    bad = [
        check
        for check in summarized([], machines=differs, ranks=[0, 1, 2], world_size=3)
        if check.is_bad
    ]
    assert [check.check for check in bad] == ["versions", "NCCL_ALGO"]


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (
            Ending(failures=[WorkerFailure(rank=1, time=0.0, returncode=-9)]),
            "rank 1 was killed by SIGKILL",
        ),
        (
            Ending(elsewhere="the rendezvous is gone; the same command continues"),
            "the rendezvous is gone",
        ),
    ],
)
def test_processes_that_did_not_come_to_the_end_are_told(ending: Ending, text: str) -> None:
    (check,) = summarized([], ending)
    assert (check.section, check.check, check.verdict) == ("rendezvous", "processes", "failed")
    assert check.found.startswith(text)
    assert "goes on" not in check.found
