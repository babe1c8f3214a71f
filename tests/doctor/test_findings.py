"""From what ranks found to lines."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from doctor.test_machine import WELL

from lockstep.doctor.findings import lines_of_results
from lockstep.doctor.line import Line
from lockstep.launch.failures import Ending, WorkerFailure

DOWN = {"wrong": "holds 1 at place 0 of 13, and must hold 2"}


def row(collective: str = "all-reduce", operation: str | None = "sum", kind: str = "float32", **outcomes: Any) -> dict[str, Any]:
    named = {rank.removeprefix("rank"): outcome for rank, outcome in outcomes.items()}
    return {"collective": collective, "operation": operation, "type": kind, "group": "all ranks", "outcomes": named}


def machines(count: int = 1, **changed: Any) -> list[dict[str, Any]]:
    """The last one is different."""
    facts = [replace(WELL, host=f"h{number}") for number in range(count - 1)] + [replace(WELL, host=f"h{count - 1}", **changed)]
    return [{"facts": asdict(each), "lines": []} for each in facts]


def said(checked: list[dict[str, Any]], ending: Ending | None = None, **more: Any) -> list[Line]:
    results = {"world_size": 2, "backend": "gloo", "machines": machines(), "checked": checked, "links": [], **more}
    return [line for line in lines_of_results(results, ending or Ending()) if line.check not in ("the rest", "processes") or line.is_bad]


def test_what_all_ranks_refuse_is_absent_and_what_one_refuses_is_wrong() -> None:
    no = {"absent": "Invalid scalar type"}
    lines = said([row(), row(kind="int16", rank0=no, rank1=no)])
    assert [(line.check, line.verdict) for line in lines] == [("all-reduce", "ok"), ("types", "absent")]
    assert lines[0].found == "right in 1 type; sum"
    assert lines[1].found == "gloo has no int16 in all-reduce"
    (line, *_) = said([row(), row(kind="int16", rank1=no)])
    assert (line.verdict, line.found) == ("wrong", "sum int16: rank 1 raised, and others did not: Invalid scalar type")


def test_an_operation_that_is_refused_in_a_type_that_is_there_is_absent() -> None:
    no = {"absent": "no avg"}
    *_, line = said([row(), row(operation="avg", rank0=no, rank1=no), row("reduce"), row("reduce", operation="avg", rank0=no, rank1=no)])
    assert (line.check, line.found) == ("operations", "gloo has no avg of float32 in reduce, all-reduce")


def test_the_first_wrong_case_stands_for_all() -> None:
    (line,) = said([row(kind="float16", rank1=DOWN), row(kind="float32", rank0=DOWN, rank1=DOWN), row()])
    assert line.found == "sum float16: rank 1 holds 1 at place 0 of 13, and must hold 2; wrong in 2 of 3 cases"


def test_machines_that_do_not_share_the_run_directory_are_named() -> None:
    more = {"machines": machines(2), "ranks": [0, 0, 1, 1], "world_size": 4}
    assert [line.verdict for line in said([], shared=[0, 1, 2, 3], **more) if line.check == "shared"] == ["ok"]
    (line,) = [line for line in said([], shared=[0, 1], **more) if line.check == "shared"]
    assert (line.verdict, line.found) == ("wrong", "what h0 writes is not there on h1")


def test_machines_with_other_versions_and_variables_are_named() -> None:
    differs = machines(3, versions={"python": "3.11.2", "torch": "2.12.0"}, variables={"NCCL_ALGO": "Ring"})
    bad = [line for line in said([], machines=differs, ranks=[0, 1, 2], world_size=3) if line.is_bad]
    assert [line.check for line in bad] == ["versions", "NCCL_ALGO"]


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (Ending(failures=[WorkerFailure(rank=1, time=0.0, returncode=-9)]), "rank 1 was killed by SIGKILL"),
        (Ending(elsewhere="the rendezvous is gone; the same command goes on"), "the rendezvous is gone"),
    ],
)
def test_processes_that_did_not_come_to_the_end_are_told(ending: Ending, text: str) -> None:
    (line,) = said([], ending)
    assert (line.section, line.check, line.verdict) == ("meeting", "processes", "wrong")
    assert line.found.startswith(text)
    assert "goes on" not in line.found
