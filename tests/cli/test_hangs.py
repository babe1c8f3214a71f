"""Whole commands that hang: the report names the rank that the others wait for, with its line, and
the run exits with 76."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from processes import LOCKSTEP, ran

from lockstep.launch.termination import HUNG_STATUS

pytestmark = pytest.mark.forks

STALLS = Path(__file__).parent.parent / "scripts" / "stalls.py"
LIMIT_SECONDS = 4

CASES = [
    ("loop", "replicate=2", 2, 1, "rank 1 is waited for: it runs Python code at {line} in loss"),
    (
        "sleeps",
        "replicate=2",
        2,
        0,
        "rank 0 is waited for: it is in a call that does not return at {line} in loss",
    ),
    (
        "data",
        "replicate=2",
        2,
        1,
        (
            "rank 1 is waited for: it is in a call that does not return at {line} in"
            " Samples.__getitem__"
        ),
    ),
    (
        "data",
        "replicate=2,workers=1",
        2,
        1,
        r"rank 1 is waited for: it waits for loader workers: process \d+ is at {line}",
    ),
    (
        "stopped",
        "replicate=2",
        2,
        0,
        r"rank 0 is waited for: process \d+ on \S+ is stopped \(by SIGSTOP",
    ),
    (
        "alone",
        "replicate=2",
        2,
        0,
        (
            r"rank 0 in all_reduce of float32 \(3,\), call \d+ of default_pg at {line} in"
            r" Between.after_step"
        ),
    ),
    (
        "another",
        "shard=2",
        2,
        1,
        (
            r"rank 0 in broadcast of .*rank 1 in all_reduce of float32 \(3,\), call \d+ of"
            r" default_pg at {line}"
        ),
    ),
    (
        "swallowed",
        "shard=2",
        2,
        1,
        (
            r"rank 0 in all_reduce of float32 \(3,\), call \d+ of default_pg at {line}(?s:.*)is"
            r" inside 'try:'"
        ),
    ),
    ("loop", "shard=2", 2, 0, "rank 0 is waited for: it runs Python code at {line} in loss"),
    ("loop", "pipeline=2", 2, 1, "rank 1 is waited for: it runs Python code at {line} in loss"),
    (
        "alone",
        "pipeline=2",
        2,
        0,
        (
            r"rank 0 in all_reduce of float32 \(3,\), call \d+ of default_pg at {line} in"
            r" Between.after_step"
        ),
    ),
    ("receives", "replicate=2", 2, 1, "rank 1 in recv at {line} in Between.after_step"),
    (
        "computes",
        "replicate=2",
        2,
        1,
        "rank 1 is waited for: it computes in native code at {line} in loss",
    ),
    (
        "sleeps",
        "replicate=4",
        4,
        2,
        "rank 2 is waited for: it is in a call that does not return at {line} in loss",
    ),
    (
        "loop",
        "shard=2,pipeline=2",
        4,
        3,
        "rank 3 is waited for: it runs Python code at {line} in loss",
    ),
    (
        "stopped",
        "replicate=2,shard=2",
        4,
        1,
        r"rank 1 is waited for: process \d+ on \S+ is stopped",
    ),
]
QUICK = (3,)
"""Of the cases; the others are in the slow tier."""


def line_of(kind: str) -> str:
    (number,) = [
        number
        for number, line in enumerate(STALLS.read_text().splitlines(), 1)
        if line.endswith(f"  # {kind}")
    ]
    return rf"{STALLS}:{number}"


def run(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    return ran([LOCKSTEP, "run", *line], env=environment)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "plan", "nproc", "rank", "said"),
    [
        pytest.param(*case, marks=pytest.mark.command if place in QUICK else pytest.mark.slow)
        for place, case in enumerate(CASES)
    ],
    ids=[f"{kind} on {rank} of {plan}" for kind, plan, _, rank, _ in CASES],
)
def test_who_is_waited_for_is_named_with_the_line_where_it_stands(
    tmp_path: Path, kind: str, plan: str, nproc: int, rank: int, said: str
) -> None:
    line = line_of(kind) if "{line}" in said else ""
    ended = run(
        tmp_path,
        "--nproc",
        str(nproc),
        "--plan",
        plan,
        "--hang-after",
        f"{LIMIT_SECONDS}s",
        str(STALLS),
        kind,
        str(rank),
        str(tmp_path / "run"),
    )
    assert ended.returncode == HUNG_STATUS, ended.stderr
    assert re.search(said.format(line=line), ended.stderr), ended.stderr
