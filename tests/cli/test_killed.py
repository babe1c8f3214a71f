"""Runs with numerics=bitwise that are killed and resumed under one plan after another: whole
commands. They end with the bits of the run of one process that nothing happened to."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import run_files
from processes import LOCKSTEP, ran
from training.subjects import learned

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "killed.py")
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
ALONE = "replicate=1"
CHAINS = [
    ("gpt", (ALONE, "pipeline=2", "shard=2")),
    (
        "gpt",
        (
            ALONE,
            "shard=2,pipeline=2",
            "pipeline=2,schedule=zero-bubble",
            "replicate=2",
            "pipeline=2",
            "replicate=2,pipeline=2,schedule=interleaved",
            "shard=2,pipeline=2,sharding=gradients",
            "pipeline=3,schedule=gpipe",
        ),
    ),
    (
        "gpt",
        (
            "slices=2",
            "tensor=2,slices=2",
            "slices=2",
            "tensor=2,pipeline=2,slices=2",
            "shard=2,tensor=2,slices=2",
            "pipeline=2,schedule=zero-bubble,slices=2",
            "replicate=2,tensor=2,slices=2",
            "shard=2,slices=2",
        ),
    ),
    (
        "experts",
        (
            ALONE,
            "expert=2",
            "shard=2,expert=2",
            ALONE,
            "shard=2",
            "expert=4",
            "replicate=2,expert=2",
            "shard=2,expert=2,sharding=gradients",
        ),
    ),
    (
        "chunks",
        (
            ALONE,
            "shard=2,context=2",
            ALONE,
            "context=2",
            "expert=2,context=2",
            "shard=2,expert=2",
            "shard=2",
            "replicate=2,context=2",
        ),
    ),
]
"""A recipe of `SCRIPT`; the plan of the undisturbed run, then those of the one that is killed."""

pytestmark = [pytest.mark.command, pytest.mark.forks, pytest.mark.timeout(300)]


def train(run: Path, name: str, steps: int, plan: str, *killed: int) -> None:
    line = [LOCKSTEP, "run", "--nproc", str(processes(plan)), "--run-dir", str(run), "--plan"]
    line += [f"{plan},numerics=bitwise", SCRIPT, name, *map(str, (steps, *killed))]
    ended = ran(line, cwd=run.parent, env=ENVIRONMENT)
    assert ended.returncode == (137 if killed else 0), (plan, ended.stderr)


def processes(plan: str) -> int:
    axes = re.findall(r"(?:replicate|shard|tensor|pipeline|context|expert)=(\d)", plan)
    return math.prod(map(int, axes))


def result(run: Path) -> list[Any]:
    found = run_files.result(run)
    return [found[name] for name in ("fingerprint", "loss", "metrics")]


def rows(run: Path) -> set[tuple[Any, ...]]:
    return {tuple(row.items()) for row in learned(run)}


@pytest.mark.parametrize(
    ("name", "plans"),
    [CHAINS[0], *(pytest.param(*chain, marks=pytest.mark.slow) for chain in CHAINS[1:])],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_a_run_that_is_killed_under_each_plan_ends_with_the_bits_of_one_process(
    tmp_path: Path, name: str, plans: Sequence[str]
) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    *others, last = plans[1:]
    steps = 2 * len(others) + 4
    train(alone, name, steps, plans[0])
    expected = rows(alone)
    for leg, plan in enumerate(others):
        train(run, name, steps, plan, leg % processes(plan), 2 * leg + 3)
        assert rows(run) <= expected, (leg, plan)
    train(run, name, steps, last)
    assert result(run) == result(alone)
    # rank 0 takes the row of the step that another rank saves after its death with it
    saved = {row for row in expected if dict(row)["step"] % 2 == 0}
    assert saved <= rows(run) <= expected
    events = run_files.events(run)
    starts = [each["step"] for each in events if each["event"] == "resumed"]
    assert len(starts) == len(others)
    assert all(2 * leg <= step <= 2 * leg + 1 for leg, step in enumerate(starts, 1))
