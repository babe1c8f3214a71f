"""How runs end, as their directories tell it, and begin again: whole commands, each of which
imports torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import run_files
from processes import LOCKSTEP, ran, started, worker

ENDLESS = Path(__file__).parent.parent / "scripts" / "endless.py"
FAILING_STAGE = ENDLESS.with_name("failing_stage.py")
TWICE = ENDLESS.with_name("twice.py")
FROM_OUTSIDE = "Terminated: {}, from the launcher or from outside the run"
PEER = (
    "PeerDied: an exchange through shared memory failed on rank 0 of 2",
    "a peer was lost: another process of this run ended",
)


@pytest.mark.parametrize(
    ("number", "target", "nproc", "plan", "status", "event", "why"),
    [
        (signal.SIGTERM, None, 2, "workers=1", 75, "preempted", "SIGTERM"),
        pytest.param(
            signal.SIGINT,
            None,
            2,
            "workers=1",
            130,
            "preempted",
            "SIGINT",
            marks=pytest.mark.command,
        ),
        pytest.param(
            signal.SIGKILL,
            None,
            2,
            "shard=2",
            -9,
            "preempted",
            "SIGTERM",
            marks=pytest.mark.command,
        ),
        pytest.param(
            signal.SIGUSR1, None, 2, "shard=2", 75, "preempted", "SIGUSR1", marks=pytest.mark.slow
        ),
        pytest.param(
            signal.SIGTERM, 0, 2, "replicate=2", 75, "preempted", "SIGTERM", marks=pytest.mark.slow
        ),
        pytest.param(
            signal.SIGUSR1, 1, 2, "replicate=2", 75, "preempted", "SIGUSR1", marks=pytest.mark.slow
        ),
        pytest.param(
            signal.SIGHUP,
            None,
            1,
            "replicate=1",
            129,
            "run-failed",
            FROM_OUTSIDE.format("SIGHUP"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            signal.SIGKILL, 1, 2, "replicate=2", 137, "run-failed", PEER, marks=pytest.mark.slow
        ),
    ],
    ids=[
        "TERM to the launcher",
        "INT to the launcher",
        "KILL to the launcher",
        "USR1 to the launcher",
        "TERM to rank 0",
        "USR1 to rank 1",
        "HUP to the launcher",
        "KILL to rank 1",
    ],
)
@pytest.mark.forks
def test_a_run_that_is_ended_saves_and_says_so_and_gives_its_directory_up(
    tmp_path: Path,
    number: signal.Signals,
    target: int | None,
    nproc: int,
    plan: str,
    status: int,
    event: str,
    why: str | tuple[str, str],
) -> None:
    run = tmp_path / "run"
    line = [LOCKSTEP, "run", "--nproc", str(nproc), "--plan", plan, str(ENDLESS), str(run)]
    # killed loader workers leave a folder there
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    with started(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
            assert launcher.poll() is None
            time.sleep(0.05)
        workers = psutil.Process(launcher.pid).children()
        os.kill(launcher.pid if target is None else worker(launcher.pid, target), number)
        launcher.communicate()
    assert launcher.returncode == status
    # where the launcher was killed, they end after it
    assert psutil.wait_procs(workers)[1] == []
    assert not (run / "lock").exists()
    rows = run_files.events(run)
    (last,) = [row for row in rows if row["event"] == event]
    assert last["reason" if event == "preempted" else "error"].startswith(why)
    (saved,) = [
        row["checkpoint"] for row in rows if row["event"] in ("checkpoint-saved", "rescued")
    ]
    assert saved.startswith(f"step-{last['step']:08d}-")
    assert last["step"] > 0
    assert os.listdir(run / "checkpoints") == [saved]


@pytest.mark.parametrize("plan", [pytest.param("replicate=2", marks=pytest.mark.slow), "shard=2"])
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(
            ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
            marks=pytest.mark.slow,
            id="torchrun",
        ),
        pytest.param(["lockstep", "run", "--nproc", "2"], id="lockstep run"),
    ],
)
@pytest.mark.slow
def test_a_script_trains_twice(tmp_path: Path, launcher: list[str], plan: str) -> None:
    # torchrun leaves a folder
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(tmp_path),
        "LOCKSTEP_PLAN": plan,
    }
    line = [sys.executable, "-m", *launcher, str(TWICE)]
    ended = ran(line, cwd=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "terminate called" not in ended.stderr
    first, second = ended.stdout.splitlines()
    assert first == second
    assert first.startswith("2 ")
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "call"),
    [(0, 1), (3, 7)],
    ids=["the first of all, on rank 0", "a later one, on rank 3"],
)
def test_a_forward_that_fails_on_one_rank_of_a_pipeline_ends_the_run_and_is_shown_once(
    tmp_path: Path, rank: int, call: int
) -> None:
    """Rank 0's shards are rank 1's, whose forwards wait for it; rank 2 is the next stage, which is
    told."""
    line = [
        LOCKSTEP,
        "run",
        "--nproc",
        "4",
        "--plan",
        "shard=2,pipeline=2",
        str(FAILING_STAGE),
        str(rank),
        str(call),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = ran(line, cwd=tmp_path, env=environment)
    assert ended.returncode == 1
    first, _, rest = ended.stderr.partition("ValueError: boom\n")
    assert re.match(
        rf"lockstep: rank {rank} failed \(exit status 1\)(, first of \d)?:\nTraceback", first
    )
    assert first.count("Traceback") == 1
    assert re.fullmatch(r"The others: .* (stopped|lost a peer)\.\n", rest)
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "lock").exists()
