"""`lockstep slurm`, `srun lockstep run` and `srun python`, on a real Slurm of three nodes that
these tests start: whole commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import run_files
from cluster import asked, cluster
from processes import LOCKSTEP, ran

pytestmark = pytest.mark.timeout(240)

SCRIPTS = Path(__file__).parent.parent / "scripts"
ELASTIC, RANKS = str(SCRIPTS / "elastic.py"), str(SCRIPTS / "ranks.py")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster(tmp_path_factory.mktemp("slurm"), 3):
        yield


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}


def srun(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    return ran(["timeout", "100", "srun", *line], cwd=folder, env=environment(folder))


@contextmanager
def submitted(folder: Path, *line: str) -> Iterator[subprocess.Popen[str]]:
    """`lockstep slurm --submit`, of a job of two nodes. The job ends with it."""
    command = [
        LOCKSTEP,
        "slurm",
        "--nodes",
        "2",
        "--cpus-per-task",
        "2",
        "--time",
        "5",
        "--name",
        "job",
        "--submit",
        *line,
    ]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder),
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        yield process
    finally:
        subprocess.run(["scancel", "--full", "--name=job"], check=True)
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():  # the test's own time limit ends it
        time.sleep(0.1)


def steps(folder: Path) -> int:
    return max(
        (int(found) for found in re.findall(r"did (\d+)", (folder / "output").read_text())),
        default=0,
    )


def job_id() -> str:
    return asked("squeue", "-h", "--name=job", "-o", "%i").strip()


def test_srun_lockstep_run_needs_no_flags(slurm: None, tmp_path: Path) -> None:
    ended = srun(
        tmp_path, "-N2", "--ntasks-per-node=1", "--gpus-per-node=2", LOCKSTEP, "run", RANKS
    )
    assert ended.returncode == 0, ended.stderr
    found = sorted(
        (each["RANK"], each["GROUP_RANK"], each["LOCAL_RANK"])
        for each in map(json.loads, ended.stdout.splitlines())
    )
    assert found == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]


def test_several_launchers_on_a_node_are_refused(slurm: None, tmp_path: Path) -> None:
    ended = srun(tmp_path, "-N1", "--ntasks-per-node=2", LOCKSTEP, "run", RANKS)
    assert ended.returncode == 2
    assert "LaunchError: srun started 2 times lockstep run on 1 nodes; " in ended.stderr


@pytest.mark.command
def test_srun_python_starts_the_processes_of_a_run(
    slurm: None, tmp_path: Path, undisturbed: str
) -> None:
    """Two on one node, one on another."""
    ended = srun(
        tmp_path,
        "-N2",
        "-n3",
        "--overcommit",
        "env",
        f"LOCKSTEP_RUN_DIR={tmp_path / 'run'}",
        sys.executable,
        ELASTIC,
        "0",
    )
    assert ended.returncode == 0, ended.stderr
    assert set(re.findall(r"rank \d of \d", ended.stdout)) == {
        f"rank {rank} of 3" for rank in range(3)
    }
    assert run_files.fingerprint(tmp_path / "run") == undisturbed


@pytest.mark.command
def test_a_job_that_makes_room_for_another_is_requeued_and_goes_on_to_the_same_model(
    slurm: None, tmp_path: Path, undisturbed: str
) -> None:
    with submitted(tmp_path, ELASTIC, "--", "0.3") as job:
        wait_for(lambda: steps(tmp_path) >= 5)
        number = job_id()
        subprocess.run(
            [
                "sbatch",
                "-p",
                "urgent",
                "-N3",
                "--exclusive",
                "-o",
                "/dev/null",
                "--wrap",
                "sleep 2",
            ],
            cwd=tmp_path,
            check=True,
        )
        _, told = job.communicate(timeout=200)
        assert job.returncode == 0, told
    states = [line for line in told.splitlines() if "pending (None)" not in line]
    assert re.fullmatch(rf"lockstep: job {number} runs on n\[\d[-,]\d\]", states[0])
    assert any(re.search(r" is pending \(.*\) \(restart 1\)$", state) for state in states)
    assert re.fullmatch(rf"lockstep: job {number} runs on n\[\d[-,]\d\] \(restart 1\)", states[-2])
    assert states[-1] == f"lockstep: job {number} has ended: COMPLETED, exit status 0"
    run = tmp_path / "runs" / f"job-{number}"
    assert run_files.fingerprint(run) == undisturbed
    preempted, resumed = run_files.events(run, "preempted", "resumed")
    assert preempted["reason"] == "SIGTERM"
    assert preempted["step"] == resumed["step"] < 30
    assert {path.name for path in tmp_path.glob("job-*")} == {
        f"job-{number}{end}.txt" for end in ("", *nodes_of(tmp_path))
    }
    assert "0-" in (tmp_path / "output").read_text()


@pytest.mark.command
def test_the_jobs_of_a_search_share_its_trials(slurm: None, tmp_path: Path) -> None:
    given = [
        "--slurm",
        "--time 5 --cpus-per-task 1 --name job",
        "--parallel",
        "3",
        "--trials",
        "6",
        "--sampler",
        "random",
    ]
    line = [
        LOCKSTEP,
        "search",
        *given,
        "--run-dir",
        "search",
        str(SCRIPTS / "searched.py"),
        "--seconds",
        "0.1",
    ]
    sent = ran(line, cwd=tmp_path, env=environment(tmp_path))
    assert sent.returncode == 0, sent.stderr
    assert re.match(r"lockstep: job \d+, an array of 3: ", sent.stderr)
    wait_for(lambda: not job_id())
    told = ran([LOCKSTEP, "report", "--json", "search"], cwd=tmp_path, check=True)
    trials = json.loads(told.stdout)["trials"]
    assert [trial["state"] for trial in trials] == ["complete"] * 6
    assert len({trial["parameters"]["lr"] for trial in trials}) == 6
    by_job = [
        re.findall(r"trial (\d) complete", path.read_text()) for path in tmp_path.glob("job-*.txt")
    ]
    assert sorted(number for numbers in by_job for number in numbers) == list("012345")
    assert sum(map(bool, by_job)) > 1


def nodes_of(folder: Path) -> list[str]:
    host = asked("hostname", "-s").strip()
    return [f"-{number}-{host}" for number in (0, 1)]


@pytest.mark.slow
def test_a_job_on_a_node_that_is_drained_goes_on_on_another(
    slurm: None, tmp_path: Path, undisturbed: str
) -> None:
    with submitted(tmp_path, ELASTIC, "--", "0.3") as job:
        wait_for(lambda: steps(tmp_path) >= 5)
        number = job_id()
        subprocess.run(
            ["scontrol", "update", "nodename=n1", "state=drain", "reason=test"], check=True
        )
        try:
            drained_at = steps(tmp_path)
            wait_for(lambda: steps(tmp_path) >= drained_at + 2)  # it does not mind
            subprocess.run(["scancel", "--signal=USR1", number], check=True)
            _, told = job.communicate(timeout=200)
        finally:
            subprocess.run(["scontrol", "update", "nodename=n1", "state=resume"], check=True)
        assert job.returncode == 0, told
    assert f"lockstep: job {number} runs on n[2-3] (restart 1)" in told
    assert run_files.fingerprint(tmp_path / "runs" / f"job-{number}") == undisturbed


@pytest.mark.command
def test_a_job_that_fails_ends_with_its_status_and_is_not_requeued(
    slurm: None, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    with submitted(tmp_path, str(script)) as job:
        _, told = job.communicate(timeout=200)
    assert job.returncode == 3
    assert re.search(r"has ended: FAILED, exit status 3$", told)
    assert "restart" not in told
    assert "rank 1 failed (exit status 3)" in (tmp_path / "output").read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_saves_before_its_time_limit_and_goes_on_after_it(
    slurm: None, tmp_path: Path, undisturbed: str
) -> None:
    with submitted(tmp_path, "--time", "2", "--signal-before", "30s", ELASTIC, "--", "4") as job:
        _, told = job.communicate(timeout=350)
        assert job.returncode == 0, told
    (run,) = (tmp_path / "runs").iterdir()
    assert run_files.fingerprint(run) == undisturbed
    assert {event["reason"] for event in run_files.events(run, "preempted")} == {"SIGUSR1"}
