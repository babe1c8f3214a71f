"""Runs that lose workers and machines, and gain machines: whole commands. They end with the bits of
the run that nothing happened to."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import run_files
from cli.agents import (
    ENVIRONMENT,
    SCRIPT,
    Agents,
    events,
    steps,
    wait_for,
    wait_until_it_keeps_the_rendezvous,
    worlds,
)
from doctor.network import Network, network
from processes import LOCKSTEP, ran, started

from lockstep.testing import leaks

pytestmark = pytest.mark.forks


@pytest.mark.parametrize(
    ("nproc", "rank", "step"),
    [
        pytest.param(2, 1, 13, marks=pytest.mark.command),
        pytest.param(3, 0, 13, marks=pytest.mark.slow),
        pytest.param(2, 0, 2, marks=pytest.mark.slow),
    ],
    ids=["1 of 2", "0 of 3", "early"],
)
def test_a_run_that_loses_a_worker_goes_on_from_what_a_survivor_had(
    tmp_path: Path, nproc: int, rank: int, step: int, undisturbed: str
) -> None:
    before = leaks.take(["shared-memory"])
    line = [
        LOCKSTEP,
        "run",
        "--nproc",
        str(nproc),
        "--max-restarts",
        "1",
        SCRIPT,
        "0",
        str(rank),
        str(step),
    ]
    ended = ran(line, cwd=tmp_path, env=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert run_files.fingerprint(run) == undisturbed
    told = [line for line in ended.stderr.splitlines() if line.startswith(("lockstep", "resumes"))]
    why = (
        f"rank {rank} was killed by SIGKILL (often the kernel or the container, because memory ran"
        " out)"
    )
    assert told == [f"lockstep: {why}; restart 1 of 1", f"resumes after step {step}"]
    restarted, resumed = events(run, "restarted", "resumed")
    assert (restarted["reason"], restarted["restarts"]) == (why, 1)
    # Newer than any of every fifth step, and saved by one that lived.
    assert resumed["checkpoint"].startswith(f"step-{step:08}")
    assert [event["checkpoint"] for event in events(run, "rescued")] == [resumed["checkpoint"]]
    assert leaks.remaining(before) == []


@pytest.mark.slow
def test_a_run_that_was_asked_to_end_is_not_started_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = [
        LOCKSTEP,
        "run",
        "--nproc",
        "2",
        "--max-restarts",
        "3",
        "--run-dir",
        str(run),
        SCRIPT,
        "0.05",
    ]
    with started(
        line, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as launcher:
        wait_for(lambda: bool(events(run, "checkpoint-saved")))
        launcher.send_signal(signal.SIGTERM)
        _, told = launcher.communicate()
    assert launcher.returncode == 75
    assert "restart" not in told
    assert events(run)[-1]["event"] == "preempted"


def test_a_second_run_of_a_script_has_a_directory_of_its_own(tmp_path: Path) -> None:
    line = [LOCKSTEP, "run", "--max-restarts", "1", str(Path(SCRIPT).with_name("twice.py"))]
    ended = ran(line, cwd=tmp_path, env=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--max-restarts", "-1"], "Invalid value for '--max-restarts'"),
        (["--nnodes", "2"], "LaunchError: --nnodes 2 without --rdzv"),
        (["--nnodes", "2:1", "--rdzv", "localhost:29400"], "LaunchError: --nnodes 2:1;"),
    ],
)
def test_mistakes_are_told_before_anything_starts(options: list[str], text: str) -> None:
    ended = ran([LOCKSTEP, "run", *options, SCRIPT], env=ENVIRONMENT)
    assert ended.returncode == 2
    assert text in ended.stderr


@pytest.mark.slow
def test_a_plan_that_does_not_fit_the_machines_that_came_is_told(agent: Agents) -> None:
    both = [agent("--plan", "replicate=3", SCRIPT, "0") for _ in range(2)]
    for each in both:
        _, told = each.communicate()
        assert each.returncode == 2
        assert re.search(r"^lockstep: PlanError: .*replicate=3", told, flags=re.MULTILINE)
        assert "restart" not in told


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_machine_joins_and_is_lost_and_the_bits_stay(
    tmp_path: Path, agent: Agents, undisturbed: str
) -> None:
    run = tmp_path / "run"
    first = agent(SCRIPT, "0.8")
    wait_for(lambda: steps(tmp_path) >= 2)
    second = agent(SCRIPT, "0.8")
    wait_for(lambda: worlds(run) == [1, 2] and steps(tmp_path) >= 12)
    second.send_signal(signal.SIGKILL)
    _, told = first.communicate()
    assert first.returncode == 0, told
    assert (
        "lockstep: another machine waits to join: the workers save, and start again with it" in told
    )
    assert "lockstep: rank " in told
    assert worlds(run) == [1, 2, 1]
    assert run_files.fingerprint(run) == undisturbed
    joined, lost = events(run, "restarted")
    assert (joined["reason"], joined["restarts"]) == ("another machine joined", 0)
    assert (lost["reason"], lost["restarts"]) == (
        "a machine was lost: 127.0.0.1; 1 of 2 are left",
        1,
    )
    (preempted,) = events(run, "preempted")
    (rescued,) = events(run, "rescued")
    after_joining, after_losing = events(run, "resumed")
    assert after_joining["checkpoint"].startswith(f"step-{preempted['step']:08}")
    assert after_losing["checkpoint"] == rescued["checkpoint"]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_third_machine_joins_two_and_no_restart_is_used_up(
    tmp_path: Path, agent: Agents, undisturbed: str
) -> None:
    run = tmp_path / "run"
    agents = [agent(nnodes="2:3"), agent(nnodes="2:3")]
    wait_for(lambda: worlds(run) == [2] and steps(tmp_path) >= 2)
    agents.append(agent(nnodes="2:3"))
    for each in agents:
        _, told = each.communicate()
        assert each.returncode == 0, told
    assert worlds(run) == [2, 3]
    assert run_files.fingerprint(run) == undisturbed
    (joined,) = events(run, "restarted")
    assert (joined["reason"], joined["restarts"]) == ("another machine joined", 0)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_without_the_machine_that_keeps_the_rendezvous_the_others_end_and_the_same_command_goes_on(
    tmp_path: Path, agent: Agents, undisturbed: str
) -> None:
    run = tmp_path / "run"
    keeper = agent(nnodes="2")
    wait_until_it_keeps_the_rendezvous(keeper)
    other = agent(nnodes="2")
    wait_for(lambda: steps(tmp_path) >= 7)
    keeper.send_signal(signal.SIGKILL)
    _, told = other.communicate()
    assert other.returncode == 1
    *_, last = told.splitlines()
    assert re.match(
        r"lockstep: the rendezvous at 127\.0\.0\.1:\d+ is gone: .*the same command .*, started"
        r" again",
        last,
    )
    newest = max(path.name for path in (run / "checkpoints").glob("step-*"))
    again = [agent(nnodes="2"), agent(nnodes="2")]
    for each in again:
        each.communicate()
        assert each.returncode == 0
    assert run_files.fingerprint(run) == undisturbed
    (resumed,) = events(run, "resumed")
    assert resumed["checkpoint"] == newest
    assert int(newest.split("-")[1]) % 5 != 0  # what the survivor had


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("asked", [0, 1], ids=["that keeps the rendezvous", "the other"])
def test_a_machine_that_is_asked_to_end_saves_and_ends_with_all_others(
    tmp_path: Path, agent: Agents, asked: int
) -> None:
    run = tmp_path / "run"
    both = [agent(nnodes="2")]
    wait_until_it_keeps_the_rendezvous(both[0])
    both.append(agent(nnodes="2"))
    wait_for(lambda: steps(tmp_path) >= 3)
    both[asked].send_signal(signal.SIGTERM)
    said = [each.communicate()[1] for each in both]
    assert [each.returncode for each in both] == [75, 75], said
    assert events(run)[-1]["event"] == "preempted"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_user_s_mistake_on_one_machine_ends_the_others_too(tmp_path: Path, agent: Agents) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "import torch.distributed as dist\n"
        "from lockstep.base.errors import DataError\n"
        "dist.init_process_group('gloo')\n"
        "if os.environ['RANK'] == '1': raise DataError('value; rule; remedy')\n"
        "dist.barrier()\n"
    )
    both = [agent(str(script), nnodes="2") for _ in range(2)]
    said = [each.communicate()[1] for each in both]
    assert sorted(each.returncode for each in both) == [1, 2], said
    assert sum("lockstep: DataError: value; rule; remedy" in each for each in said) == 1
    assert sum("was ended by another machine" in each or "is gone" in each for each in said) == 1


@pytest.mark.parametrize(
    ("restarts", "statuses"), [(0, [1, 3]), pytest.param(1, [0, 0], marks=pytest.mark.slow)]
)
@pytest.mark.command
def test_a_machine_that_is_done_hears_of_one_that_fails_later(
    tmp_path: Path, agent: Agents, restarts: int, statuses: list[int]
) -> None:
    """Torch's would wait for it for five minutes, deaf to signals, and keep it from starting
    again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(1)\n"
        "    sys.exit(3 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))\n"
    )
    both = [agent("--max-restarts", str(restarts), str(script), nnodes="2") for _ in range(2)]
    said = [each.communicate()[1] for each in both]
    assert sorted(each.returncode for each in both) == statuses, said
    if restarts == 0:
        assert (
            sum("was ended by another machine" in each or "is gone" in each for each in said) == 1
        )


@pytest.fixture
def three_hosts() -> Iterator[Network]:
    with network(3) as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_machine_whose_link_is_cut_is_lost_and_ends_by_itself(
    tmp_path: Path, three_hosts: Network, agent: Agents, undisturbed: str
) -> None:
    run = tmp_path / "run"
    keeper = three_hosts.address(2)
    agents = [
        agent(
            "--nproc",
            "2",
            SCRIPT,
            "0.5",
            nnodes="1:3",
            host=keeper,
            before=three_hosts.inside(host),
        )
        for host in three_hosts.hosts
    ]
    wait_for(lambda: worlds(run) == [6] and steps(tmp_path) >= 7)
    listening = ran(["ip", "netns", "exec", three_hosts.hosts[2], "ss", "-ltnH"], check=True).stdout
    assert {line.split()[3].rpartition(":")[0] for line in listening.splitlines()} == {keeper}
    three_hosts.cut(1)  # of rank 0
    _, told = agents[0].communicate()
    assert agents[0].returncode == 1
    assert f"the rendezvous at {keeper}:" in told
    for each in agents[1:]:
        _, told = each.communicate()
        assert each.returncode == 0, told
    assert worlds(run) == [6, 4]
    assert (
        events(run, "restarted")[0]["reason"]
        == f"a machine was lost: {three_hosts.address(1)}; 2 of 3 are left"
    )
    assert run_files.fingerprint(run) == undisturbed
