"""Slurm's batch script, and what Slurm says: values alone, no Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.base.errors import LaunchError
from lockstep.launch import slurm as sbatch
from lockstep.launch.machines import Machines
from lockstep.launch.slurm import (
    BatchScript,
    JobState,
    SlurmStep,
    expand_counts,
    expand_nodes,
    limit_seconds,
)
from lockstep.options import LaunchOptions

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "2",
}
LAUNCHERS = {
    **STEP,
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}

EXPECTED = """\
#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1  # lockstep run starts the processes of its node
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=2:00:00
#SBATCH --signal=USR1@300  # so many seconds before that, the run saves and ends
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=gpt-%j.txt
#SBATCH --partition=gpu

# The environment of the run.
export PATH='/my venv/bin':$PATH
module load cuda

# The nodes meet at the first of them, at a port made of the job's number: lockstep run sees both in what srun sets.
# Each node's output goes to a file of its own. A node that has ended does not end the others: they may be saving.
srun --cpus-per-task=96 --kill-on-bad-exit=0 --open-mode=append --output=gpt-%j-%n-%N.txt \\
    lockstep run --run-dir "runs/gpt-$SLURM_JOB_ID" --plan shard=32 train.py --text 'a b'
status=$?

# 75: it was asked to end, before the time limit or for another job, and has saved. It will go on.
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def test_a_batch_script_is_as_expected() -> None:
    batch = BatchScript(
        script="train.py",
        arguments=["--text", "a b"],
        run=["--plan", "shard=32"],
        name="gpt",
        nodes=4,
        gpus_per_node=8,
        cpus_per_task=96,
        time="2:00:00",
        signal_seconds=300,
        path="/my venv/bin",
        setup=["module load cuda"],
        sbatch=["--partition=gpu"],
    )
    assert batch.text() == EXPECTED


def test_what_was_not_asked_for_is_not_in_a_batch_script() -> None:
    lines = (
        BatchScript(script="train.py", name="a", nodes=1, time="30", run=["--run-dir", "/shared/a"])
        .text()
        .splitlines()
    )
    assert "#SBATCH --exclusive" in lines
    assert not any(
        "gpus" in line or "cpus" in line or "PATH" in line or "environment" in line
        for line in lines
    )
    assert "    lockstep run --run-dir /shared/a train.py" in lines
    assert "srun --kill-on-bad-exit=0 --open-mode=append --output=a-%j-%n-%N.txt \\" in lines


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("1-0:0:1", 86401),
        ("UNLIMITED", None),
    ],
)
def test_limits_are_read_as_slurm_reads_them(time: str, seconds: int | None) -> None:
    assert limit_seconds(time) == seconds


@pytest.mark.parametrize("time", ["2h", "", "1:2:3:4", "-1", "1-"])
def test_limits_that_slurm_does_not_know_are_refused(time: str) -> None:
    with pytest.raises(LaunchError, match=f"--time {time}; it must be a time as Slurm writes it"):
        limit_seconds(time)


def test_the_signal_comes_after_the_beginning() -> None:
    with pytest.raises(LaunchError, match="--signal-before 120s with --time 2;"):
        BatchScript(script="train.py", name="a", nodes=1, time="2").text()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,5],login", ["n1", "n2", "n3", "n5", "login"]),
        ("a[08-10]", ["a08", "a09", "a10"]),
        ("r[1-2]n[01-02]-ib,x-1", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib", "x-1"]),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["", "n[1-2", "n]1", "n[a]", "a,,b", "a b"])
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(ValueError, match="no list of nodes"):
        expand_nodes(text)


def test_numbers_of_tasks() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="no numbers of tasks"):
        expand_counts("2(3)")


def test_a_task_of_srun_is_a_process_of_the_run() -> None:
    step = SlurmStep.read({**STEP, "SLURM_CPUS_PER_TASK": "6"})
    assert step is not None
    assert step.variables("10.0.0.1") == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "11009",
        "LOCKSTEP_LAUNCHER": "srun",
        "OMP_NUM_THREADS": "6",
    }


def test_variables_are_set_where_no_launcher_has_and_srun_started_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sbatch, "address_of", lambda node: f"address of {node}")
    environ = dict(STEP)
    sbatch.set_task_variables(environ)
    assert (environ["RANK"], environ["MASTER_ADDR"]) == ("2", "address of n1")
    in_the_batch_script = {name: value for name, value in STEP.items() if "STEP" not in name}
    alone = {
        **STEP,
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    for untouched in ({}, in_the_batch_script, alone, {**STEP, "RANK": "0", "WORLD_SIZE": "1"}):
        environ = dict(untouched)
        sbatch.set_task_variables(environ)
        assert environ == untouched


def test_the_launchers_of_a_step_meet_at_its_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbatch, "address_of", lambda node: node)
    step = SlurmStep.read(LAUNCHERS)
    assert step is not None
    assert sbatch.machines_of(step, LaunchOptions(interface="eth1")) == Machines(
        2, 2, "n1", 11009, 1, "eth1", "the first node of the Slurm job,"
    )
    alone = SlurmStep.read(
        {
            **LAUNCHERS,
            "SLURM_STEP_NODELIST": "n1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_NODEID": "0",
        }
    )
    assert alone is not None
    assert sbatch.machines_of(alone, LaunchOptions()) is None
    with pytest.raises(LaunchError, match="--interface eth1 on one machine"):
        sbatch.machines_of(alone, LaunchOptions(interface="eth1"))
    several = SlurmStep.read(STEP)
    assert several is not None
    with pytest.raises(LaunchError, match="srun started 4 times lockstep run on 2 nodes"):
        sbatch.machines_of(several, LaunchOptions())


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLURM_STEP_NODELIST", "n[1"), ("SLURM_PROCID", "one"), ("SLURM_JOB_ID", None)],
)
def test_half_a_step_is_refused(name: str, value: str | None) -> None:
    environ = {key: found for key, found in {**STEP, name: value}.items() if found is not None}
    with pytest.raises(
        LaunchError, match="SLURM_STEP_ID=1, but srun's other variables are missing or incomplete"
    ):
        SlurmStep.read(environ)


def test_the_address_of_a_node_is_its_name_or_what_slurm_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"n1": "10.0.0.1", "n2": "127.0.1.1", "10.0.0.2": "10.0.0.2"}
    monkeypatch.setattr(sbatch, "_resolved", known.get)
    monkeypatch.setattr(
        sbatch, "_ask", lambda line: "NodeName=n2 NodeAddr=10.0.0.2 NodeHostName=n2"
    )
    assert [sbatch.address_of(node) for node in ("n1", "n2", "n3")] == [
        "n1",
        "10.0.0.2",
        "10.0.0.2",
    ]

    def refused(line: list[str]) -> str:
        raise LaunchError("no")

    monkeypatch.setattr(sbatch, "_ask", refused)
    assert sbatch.address_of("n2") == "n2"
    with pytest.raises(
        LaunchError, match="the address of n3, the first node of the Slurm job, cannot be found"
    ):
        sbatch.address_of("n3")


@pytest.mark.parametrize(
    ("fields", "words", "status"),
    [
        (
            "JobState=PENDING Reason=Resources Restarts=0 ExitCode=0:0 NodeList=(null)",
            "is pending (Resources)",
            None,
        ),
        (
            "JobState=RUNNING Reason=None Restarts=2 ExitCode=0:0 NodeList=n[1-2]",
            "runs on n[1-2] (restart 2)",
            None,
        ),
        (
            "JobState=COMPLETED Reason=None Restarts=1 ExitCode=0:0 NodeList=n1",
            "has ended: COMPLETED, exit status 0",
            0,
        ),
        (
            "JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=3:0 NodeList=n1",
            "has ended: FAILED, exit status 3",
            3,
        ),
        (
            "JobState=CANCELLED Reason=None Restarts=0 ExitCode=0:15 NodeList=n1",
            "has ended: CANCELLED, exit status 143",
            143,
        ),
        (
            "JobState=TIMEOUT Reason=TimeLimit Restarts=0 ExitCode=0:0 NodeList=n1",
            "has ended: TIMEOUT, exit status 0",
            1,
        ),
    ],
)
def test_what_slurm_says_of_a_job(fields: str, words: str, status: int | None) -> None:
    state = JobState.read(f"JobId=12 JobName=a {fields} Command=(null)")
    assert str(state) == words
    assert state.has_ended is (status is not None)
    if status is not None:
        assert state.status == status


def test_a_job_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sbatch, "POLL_SECONDS", 0)
    Path("a-5.txt").write_text("srun: hello\n")
    Path("a-50.txt").write_text("another job\n")
    Path("a-5-0-n1.txt").write_text("one\ntw")
    states = iter(["RUNNING", "RUNNING", "FAILED"])

    def ask(line: list[str]) -> str:
        state = next(states)
        if state == "FAILED":
            Path("a-5-0-n1.txt").write_text("one\ntwo\nthree")
        return (
            f"JobId=5 JobState={state} Reason=None Restarts=0"
            f" ExitCode={3 if state == 'FAILED' else 0}:0 NodeList=n1"
        )

    monkeypatch.setattr(sbatch, "_ask", ask)
    said: list[str] = []
    shown: list[str] = []
    assert sbatch.follow(5, "a", said.append, shown.append) == 3
    assert said == ["job 5 runs on n1", "job 5 has ended: FAILED, exit status 3"]
    assert shown == ["srun: hello", "0-n1: one", "0-n1: two", "0-n1: three"]


def test_without_slurm_its_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="no program sbatch here; it is part of Slurm"):
        sbatch.submit("#!/bin/bash")
