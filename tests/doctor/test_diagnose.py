"""Diagnoses of two ranks with a fault planted in one of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.doctor.check_result import CheckResult
from lockstep.doctor.diagnose import DEADLINE_SECONDS, Diagnosis, diagnose
from lockstep.doctor.expected_results import COLLECTIVES
from lockstep.doctor.summary import RankStatus, stalled_check

FAULTS = str(Path(__file__).with_name("faults.py"))
HANGING = ("hang", "stop")
HANGING_DEADLINE_SECONDS = 6.0
BREAKABLE = (
    "all-reduce",
    "barrier",
    "all-to-all",
    "broadcast",
    "reduce",
    "scatter",
    "all-gather",
    "reduce-scatter",
)
"""Those after the second are slow tests."""


def diagnosed(fault: str) -> Diagnosis:
    environ = {**os.environ, "FAULT": fault, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    deadline = HANGING_DEADLINE_SECONDS if fault in HANGING else DEADLINE_SECONDS
    return diagnose(nproc=2, environ=environ, worker=[FAULTS], deadline_seconds=deadline)


def of(found: Diagnosis, *sections: str) -> list[CheckResult]:
    return [
        check
        for check in found.checks
        if check.section in sections and check.verdict not in ("ok", "skipped")
    ]


@pytest.mark.parametrize(
    "collective",
    [*BREAKABLE[:1], *(pytest.param(each, marks=pytest.mark.slow) for each in BREAKABLE[1:])],
)
def test_a_wrong_result_of_a_wrapped_collective_is_found(collective: str) -> None:
    found = diagnosed(collective)
    assert found.status == 1
    (check,) = of(found, "collectives", "rendezvous")
    assert (check.check, check.verdict) == (collective, "failed")
    assert re.search(r"rank [01] " if collective == "barrier" else "rank 1 ", check.found)
    assert "left when" in check.found if collective == "barrier" else "at index " in check.found
    right = [
        each.check
        for each in found.checks
        if each.section == "collectives" and each.verdict == "ok"
    ]
    assert right == [each for each in COLLECTIVES if each != collective]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        pytest.param("hang", f"timed out: rank 1 is at {FAULTS}:", marks=pytest.mark.command),
        pytest.param("kill", "rank 1 was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param("stop", "timed out: rank 1 does not answer", marks=pytest.mark.slow),
        pytest.param(
            "refuse", "rank 1 failed: RuntimeError: no such thing here", marks=pytest.mark.slow
        ),
    ],
)
def test_a_collective_that_does_not_end_does_not_hold_the_doctor_up(fault: str, text: str) -> None:
    found = diagnosed(fault)
    assert found.status == 1
    check, *_ = of(found, "collectives", "rendezvous")
    assert (check.verdict, check.check) == ("failed", "all-reduce sum bool")
    assert text in check.found
    assert any(
        each.verdict == "skipped" and "not run: all-reduce, scatter" in each.found
        for each in found.checks
    )


@pytest.mark.slow
def test_a_machine_whose_clock_is_ahead_is_named(tmp_path: Path, port: int) -> None:
    code = f"""
import json, sys
from dataclasses import asdict
from lockstep.doctor.diagnose import diagnose
from lockstep.launch.machines import Machines
found = diagnose(nproc=1, machines=Machines(2, 2, "127.0.0.1", int(sys.argv[1])), worker=[{FAULTS!r}])
print(json.dumps([found.status, [asdict(check) for check in found.checks]]))
"""
    environ = {**os.environ, "FAULT": "clock", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(port)],
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [each.communicate()[0] for each in started]
    for text in said:
        code, checks = json.loads(text)
        assert code == 1
        (check,) = [
            check for check in checks if check["check"] == "clock" and check["section"] == "machine"
        ]
        assert check["verdict"] == "failed"
        assert check["found"].startswith("30 s ahead of")
        assert check["machine"].endswith("#1")
        assert check["remedy"]


def status(
    rank: int, index: int = 7, location: str | None = None, error: str | None = None
) -> RankStatus:
    return RankStatus(
        rank=rank, index=index, probe=f"probe {index}", location=location, error=error
    )


@pytest.mark.parametrize(
    ("statuses", "text"),
    [
        ([status(0), status(2)], "ranks 1, 3 do not answer"),
        ([status(0), status(1, 6), status(2), status(3)], "rank 1 is still in probe 6"),
        (
            [status(0), status(1, location="x.py:3, in f"), status(2), status(3)],
            "rank 1 is at x.py:3, in f",
        ),
        ([status(0), status(1, error="E"), status(2), status(3)], "rank 1 failed: E"),
        ([status(0), status(1), status(2), status(3)], "all ranks entered it and wait"),
    ],
)
def test_who_did_not_come_follows_from_the_statuses(statuses: list[RankStatus], text: str) -> None:
    check = stalled_check(statuses, 4)
    assert text in check.found
    assert (check.verdict, check.check) == ("failed", "probe 7")
    assert check.remedy
