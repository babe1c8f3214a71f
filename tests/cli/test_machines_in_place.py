"""Runs on several machines that recover in place: whole commands. They end with the bits of the run
that nothing happened to, in the processes that were there."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import run_files
from cli.agents import SCRIPT, Agents, events, steps, wait_for, worlds

pytestmark = [pytest.mark.forks, pytest.mark.timeout(150)]

IN_PLACE = ("--recovery", "in-place", "--plan", "replicate=auto,numerics=bitwise")


def workers(launcher: psutil.Popen) -> set[int]:
    """The processes of its workers that train."""
    found = psutil.Process(launcher.pid).children(recursive=True)
    return {
        each.pid
        for each in found
        if "LOCKSTEP_STARTED_BY" in each.environ() and each.ppid() == launcher.pid
    }


@pytest.mark.command
def test_a_machine_joins_and_is_lost_while_the_other_keeps_its_process(
    tmp_path: Path, agent: Agents, undisturbed: str
) -> None:
    run = tmp_path / "run"
    first = agent(*IN_PLACE, SCRIPT, "2")
    wait_for(lambda: steps(tmp_path) >= 1)
    before = workers(first)
    second = agent(*IN_PLACE, SCRIPT, "2")
    # `run-started` comes before the state is restored
    wait_for(lambda: bool(events(run, "recovered")))
    joined_after = events(run, "recovered")[0]["step"]
    wait_for(lambda: steps(tmp_path) > joined_after)
    assert worlds(run) == [1, 2]
    second.send_signal(signal.SIGKILL)
    wait_for(lambda: worlds(run) == [1, 2, 1])
    assert workers(first) == before
    (tmp_path / "go-on").touch()
    _, told = first.communicate()
    assert first.returncode == 0, told
    assert "lockstep: another machine joins: the workers wait for it" in told
    assert run_files.fingerprint(run) == undisturbed
    joined, lost = events(run, "recovered")
    assert (joined["reason"], joined["state"]) == ("another machine joined", "replica")
    assert (lost["reason"], lost["state"]) == (
        "a machine was lost: 127.0.0.1; 1 of 2 are left",
        "replica",
    )
    assert not events(run, "restarted", "resumed")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_of_one_machine_is_replaced_while_the_other_keeps_its_process(
    tmp_path: Path, agent: Agents, undisturbed: str, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    both = [agent(*IN_PLACE, "--hang-after", "3s", SCRIPT, "0.4", nnodes="2") for _ in range(2)]
    wait_for(lambda: steps(tmp_path) >= 7)
    (kept,), (victim,) = (workers(each) for each in both)
    os.kill(victim, number)
    said = [each.communicate()[1] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert run_files.fingerprint(run) == undisturbed
    (recovered,) = events(run, "recovered")
    why = (
        "was killed by SIGKILL"
        if number == signal.SIGKILL
        else "failed (exit status 76): HangError"
    )
    assert re.match(rf"rank \d {re.escape(why)}", recovered["reason"])
    assert sum("another machine has lost a worker" in each for each in said) == 1
    assert kept
