"""Who a process is, from its environment variables."""

from __future__ import annotations

import os

import pytest

from lockstep.base.errors import LaunchError
from lockstep.launch.environment import Environment
from lockstep.options import COMPARE_EVERY

pytestmark = pytest.mark.usefixtures("eight_cores")

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))


def test_a_process_without_a_launcher_is_rank_0_of_1() -> None:
    assert Environment.read({"HOME": "/root"}) == Environment(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        launcher="python",
        compare_every=COMPARE_EVERY,
        threads=8,
    )


def test_what_torchrun_sets_is_read() -> None:
    assert Environment.read(TORCHRUN) == Environment(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        launcher="torchrun",
        compare_every=COMPARE_EVERY,
        threads=4,
    )


@pytest.mark.parametrize("launcher", ["lockstep", "spawn"])
def test_our_launchers_say_who_they_are_and_pass_the_plan_and_the_run_directory(
    launcher: str,
) -> None:
    read = Environment.read(
        TORCHRUN
        | {
            "LOCKSTEP_LAUNCHER": launcher,
            "LOCKSTEP_PLAN": "replicate=4",
            "LOCKSTEP_RUN_DIR": "/runs/a",
        }
    )
    assert (read.launcher, read.plan, read.run_dir) == (launcher, "replicate=4", "/runs/a")


def test_how_a_run_is_looked_after_is_read() -> None:
    names = {
        "HANG_AFTER": "90s",
        "ON_HANG": "report",
        "CHECK": "1",
        "COMPARE_EVERY": "10",
        "PROFILE": "steps=2:4",
    }
    read = Environment.read({f"LOCKSTEP_{name}": value for name, value in names.items()})
    assert (read.hang_after, read.on_hang, read.check, read.compare_every, read.profile) == (
        "90s",
        "report",
        True,
        10,
        "steps=2:4",
    )
    nothing = Environment.read({"LOCKSTEP_HANG_AFTER": "", "LOCKSTEP_CHECK": ""})
    assert (nothing.hang_after, nothing.check, nothing.compare_every) == (
        None,
        False,
        COMPARE_EVERY,
    )
    for name, value in (("LOCKSTEP_CHECK", "yes"), ("LOCKSTEP_COMPARE_EVERY", "-1")):
        with pytest.raises(LaunchError, match=name):
            Environment.read({name: value})


def test_fields_that_may_change_are_a_list() -> None:
    assert Environment.read({"LOCKSTEP_ALLOW_CHANGE": "steps, schedule,"}).allow_change == {
        "steps",
        "schedule",
    }


def test_an_empty_plan_or_run_directory_is_none() -> None:
    read = Environment.read({"LOCKSTEP_PLAN": "", "LOCKSTEP_RUN_DIR": ""})
    assert (read.plan, read.run_dir) == (None, None)


def test_without_local_ranks_all_processes_are_on_this_machine() -> None:
    read = Environment.read({"RANK": "1", "WORLD_SIZE": "3"})
    assert (read.local_rank, read.local_world_size) == (1, 3)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {"RANK": "1"},
            (
                "RANK=1 without WORLD_SIZE; a launcher sets both; unset RANK to run one process, or"
                " set WORLD_SIZE"
            ),
        ),
        (
            {"WORLD_SIZE": "2"},
            (
                "WORLD_SIZE=2 without RANK; a launcher sets both; unset WORLD_SIZE to run one"
                " process, or set RANK"
            ),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            (
                "LOCAL_RANK=0 without LOCAL_WORLD_SIZE; a launcher sets both; unset LOCAL_RANK to"
                " run one process, or set LOCAL_WORLD_SIZE"
            ),
        ),
        (
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            (
                "LOCAL_RANK=0 without RANK; a launcher sets RANK, WORLD_SIZE, LOCAL_RANK and"
                " LOCAL_WORLD_SIZE; unset LOCAL_RANK and LOCAL_WORLD_SIZE to run one process, or"
                " start the script with lockstep run"
            ),
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            (
                "RANK=2 with WORLD_SIZE=2; ranks count from 0 to WORLD_SIZE - 1; correct what sets"
                " them"
            ),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "0"},
            (
                "RANK=0 with WORLD_SIZE=0; ranks count from 0 to WORLD_SIZE - 1; correct what sets"
                " them"
            ),
        ),
        (
            TORCHRUN | {"LOCAL_RANK": "2"},
            (
                "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2; ranks count from 0 to LOCAL_WORLD_SIZE - 1;"
                " correct what sets them"
            ),
        ),
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": "5"},
            (
                "LOCAL_WORLD_SIZE=5 with WORLD_SIZE=4; a machine's processes are a part of all"
                " processes; correct what sets them"
            ),
        ),
        (
            {"RANK": "one", "WORLD_SIZE": "2"},
            "RANK='one'; it must be a whole number of at least 0; correct what sets it, or unset it",
        ),
        (
            {"RANK": "-1", "WORLD_SIZE": "2"},
            "RANK='-1'; it must be a whole number of at least 0; correct what sets it, or unset it",
        ),
        (
            {"LOCKSTEP_LAUNCHER": "mpirun"},
            (
                "LOCKSTEP_LAUNCHER=mpirun; lockstep's launchers set it to one of python, torchrun,"
                " lockstep, spawn, srun; unset it"
            ),
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(environ: dict[str, str], text: str) -> None:
    with pytest.raises(LaunchError) as refused:
        Environment.read(environ)
    assert str(refused.value) == text


def test_threads_are_what_somebody_asked_for_else_a_share_of_the_cores() -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    ours = {**rank, "LOCKSTEP_LAUNCHER": "lockstep"}
    assert Environment.read(rank).threads == 4
    # torchrun sets it unasked
    assert Environment.read({**rank, "OMP_NUM_THREADS": "1"}).threads == 4
    assert Environment.read({**rank, "OMP_NUM_THREADS": "3"}).threads == 3
    assert Environment.read({**ours, "OMP_NUM_THREADS": "1"}).threads == 1
    assert Environment.read({"OMP_NUM_THREADS": "12"}).threads == 12


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_a_process_of_mpirun_without_a_rank_is_refused_not_trained_alone(name: str) -> None:
    with pytest.raises(
        LaunchError,
        match=(
            rf"{name}=4 without RANK: mpirun has started this process.*start the script with"
            r" lockstep run"
        ),
    ):
        Environment.read({name: "4"})
    assert Environment.read({name: "1"}).world_size == 1
    assert Environment.read({name: "4", "RANK": "3", "WORLD_SIZE": "4"}).rank == 3
