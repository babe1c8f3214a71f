"""Whole commands of which a process runs out of memory: they start again under a plan that needs
less of it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import run_files
from processes import LOCKSTEP, ran
from training.kept import run as undisturbed

from lockstep.testing.pool import WorkerPool

pytestmark = pytest.mark.forks

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "scarce.py")
AT = 3
AGAIN = re.compile(
    rf"^lockstep: memory ran out after step {AT} on rank (\d), (\S+) from there; starts again$",
    re.MULTILINE,
)


def lockstep_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    line = [LOCKSTEP, "run", *arguments]
    return ran(line, cwd=folder, env=environment)


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = run_files.result(folder / "run")
    return found


def resumed_at(folder: Path) -> list[int]:
    rows = run_files.events(folder / "run")
    return [row["step"] for row in rows if row["event"] == "resumed"]


@pytest.mark.command
def test_it_starts_again_under_the_plan_that_a_rank_wrote_down_until_memory_is_enough(
    tmp_path: Path,
) -> None:
    """Rank 0 sees no more of rank 1 than its end."""
    ended = lockstep_run(
        tmp_path, "--run-dir", "run", "--plan", "pipeline=2", SCRIPT, "with 2 samples"
    )
    assert ended.returncode == 0, ended.stderr
    assert AGAIN.findall(ended.stderr) == [
        ("1", "checkpointing=full"),
        ("1", "microbatch_splits=1"),
    ]
    assert len(list(tmp_path.glob("fired-*"))) >= 2
    assert result(tmp_path)["plan"].endswith(
        "pipeline=2,numerics=fast,checkpointing=full,microbatch_splits=1"
    )
    assert resumed_at(tmp_path) == [AT, AT]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_in_bitwise_numerics_the_fingerprint_is_that_of_one_process_with_memory_enough(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    ended = lockstep_run(
        tmp_path,
        "--run-dir",
        "run",
        "--plan",
        f"{plan},numerics=bitwise",
        SCRIPT,
        "with checkpointing",
    )
    assert (ended.returncode, len(list(tmp_path.glob("fired-*")))) == (0, 1), ended.stderr
    ((_, fingerprint),) = pool.run(
        1, undisturbed, "replicate=1,numerics=bitwise", str(tmp_path / "undisturbed"), None, {}
    )
    assert result(tmp_path)["fingerprint"] == fingerprint
    assert resumed_at(tmp_path) == [AT]


@pytest.mark.command
def test_it_does_what_the_command_line_says(tmp_path: Path) -> None:
    ended = lockstep_run(tmp_path, "--nproc", "1", "--out-of-memory", "stop", SCRIPT, "never")
    assert (ended.returncode, len(list(tmp_path.glob("fired-*")))) == (1, 1)
    assert AGAIN.findall(ended.stderr) == []
    assert (
        "lockstep: memory ran out; --out-of-memory stop allows no change of the plan"
        in ended.stderr
    )


@pytest.mark.slow
def test_it_ends_where_nothing_is_left_to_change_in_the_one_directory_that_all_starts_had(
    tmp_path: Path,
) -> None:
    ended = lockstep_run(
        tmp_path, "--plan", "replicate=1,checkpointing=full,microbatch_splits=1", SCRIPT, "never"
    )
    assert (ended.returncode, len(list(tmp_path.glob("fired-*")))) == (1, 2)
    assert [change for _, change in AGAIN.findall(ended.stderr)] == ["microbatch_splits=2"]
    assert (
        "lockstep: memory ran out with checkpointing=full,microbatch_splits=2; microbatches have"
        " one sample each" in ended.stderr
    )
    assert len(list((tmp_path / "runs").iterdir())) == 1
