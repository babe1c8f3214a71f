"""Examinations of two ranks in which something is broken in one of them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.doctor.definitions import COLLECTIVES
from lockstep.doctor.examine import Examination, examine
from lockstep.doctor.late import Note, line_of
from lockstep.doctor.line import Line

FAULTS = str(Path(__file__).with_name("faults.py"))
DEADLINE_SECONDS = 6.0
BREAKABLE = ("all-reduce", "barrier", "all-to-all", "broadcast", "reduce", "scatter", "all-gather", "reduce-scatter")
"""Those after the second are slow tests."""


def examined(fault: str) -> Examination:
    environ = {**os.environ, "FAULT": fault, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return examine(nproc=2, environ=environ, worker=[FAULTS], deadline_seconds=DEADLINE_SECONDS)


def of(found: Examination, *sections: str) -> list[Line]:
    return [line for line in found.lines if line.section in sections and line.verdict not in ("ok", "absent")]


@pytest.mark.parametrize("collective", [*BREAKABLE[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in BREAKABLE[2:])])
def test_a_wrong_result_of_a_wrapped_collective_is_found(collective: str) -> None:
    found = examined(collective)
    assert found.status == 1
    (line,) = of(found, "collectives", "meeting")
    assert (line.check, line.verdict) == (collective, "wrong")
    assert re.search(r"rank [01] " if collective == "barrier" else "rank 1 ", line.found)
    assert "left when" in line.found if collective == "barrier" else "at place " in line.found
    right = [each.check for each in found.lines if each.section == "collectives" and each.verdict == "ok"]
    assert right == [each for each in COLLECTIVES if each != collective]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("hang", f"did not end in time: rank 1 stands in {FAULTS}:"),
        ("kill", "rank 1 was killed by SIGKILL"),
        pytest.param("stop", "did not end in time: rank 1 does not answer", marks=pytest.mark.slow),
        pytest.param("refuse", "rank 1 failed: RuntimeError: no such thing here", marks=pytest.mark.slow),
    ],
)
def test_a_collective_that_does_not_end_does_not_hold_the_doctor_up(fault: str, text: str) -> None:
    found = examined(fault)
    assert found.status == 1
    line, *_ = of(found, "collectives", "meeting")
    assert (line.verdict, line.check) == ("wrong", "all-reduce sum bool")
    assert text in line.found
    assert any(each.verdict == "absent" and "not tried any more: all-reduce, scatter" in each.found for each in found.lines)


def test_a_machine_whose_clock_is_ahead_is_named(tmp_path: Path) -> None:
    code = f"""
import json, sys
from dataclasses import asdict
from lockstep.doctor.examine import examine
from lockstep.launch.machines import Machines
found = examine(nproc=1, machines=Machines(2, 2, "127.0.0.1", int(sys.argv[1])), worker=[{FAULTS!r}])
print(json.dumps([found.status, [asdict(line) for line in found.lines]]))
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {**os.environ, "FAULT": "clock", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(port)], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [each.communicate(timeout=50)[0] for each in started]
    for text in said:
        status, lines = json.loads(text)
        assert status == 1
        (line,) = [line for line in lines if line["check"] == "clock" and line["section"] == "machine"]
        assert line["verdict"] == "wrong"
        assert line["found"].startswith("30 s ahead of")
        assert line["machine"].endswith("#1")
        assert line["remedy"]


def note(rank: int, index: int = 7, place: str | None = None, error: str | None = None) -> Note:
    return Note(rank=rank, index=index, probe=f"probe {index}", place=place, error=error)


@pytest.mark.parametrize(
    ("notes", "text"),
    [
        ([note(0), note(2)], "ranks 1, 3 do not answer"),
        ([note(0), note(1, 6), note(2), note(3)], "rank 1 is still in probe 6"),
        ([note(0), note(1, place="x.py:3, in f"), note(2), note(3)], "rank 1 stands in x.py:3, in f"),
        ([note(0), note(1, error="E"), note(2), note(3)], "rank 1 failed: E"),
        ([note(0), note(1), note(2), note(3)], "all ranks came, and wait"),
    ],
)
def test_who_did_not_come_follows_from_the_notes(notes: list[Note], text: str) -> None:
    line = line_of(notes, 4)
    assert text in line.found
    assert (line.verdict, line.check) == ("wrong", "probe 7")
    assert line.remedy
