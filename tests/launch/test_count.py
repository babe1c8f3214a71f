"""How many processes are started for what was asked."""

from __future__ import annotations

import pytest

from lockstep.base.errors import LaunchError, PlanError
from lockstep.launch.environment import count_processes
from lockstep.plan import Plan


def count(asked: str | int, plan: str | None = None, gpus: int = 0) -> int:
    return count_processes(
        asked, Plan.parse(plan) if plan is not None else None, lambda: gpus, name="--nproc "
    )


@pytest.mark.parametrize(
    ("asked", "plan", "gpus", "expected"),
    [
        ("3", None, 0, 3),
        (3, None, 8, 3),
        ("auto", None, 0, 1),
        ("auto", None, 8, 8),
        ("gpu", None, 8, 8),
        ("auto", "replicate=2", 0, 2),
        ("auto", "replicate=2", 8, 2),
        ("auto", "replicate=auto", 8, 8),
        ("auto", "numerics=bitwise", 0, 1),
        ("4", "numerics=bitwise", 0, 4),
        ("2", "replicate=2,numerics=bitwise", 0, 2),
    ],
)
def test_the_number_of_processes(
    asked: str | int, plan: str | None, gpus: int, expected: int
) -> None:
    assert count(asked, plan, gpus) == expected


def test_gpus_are_counted_only_where_their_number_matters() -> None:
    def count_gpus() -> int:
        raise AssertionError("this imports torch")

    assert count_processes("2", Plan.parse("replicate=2"), count_gpus, name="--nproc ") == 2
    assert count_processes("auto", Plan.parse("replicate=2"), count_gpus, name="--nproc ") == 2


@pytest.mark.parametrize("asked", ["0", "-1", "two", "1.5", "", 0, -1, True])
def test_what_is_not_a_number_of_processes_is_refused(asked: str | int) -> None:
    with pytest.raises(LaunchError) as refused:
        count(asked)
    assert (
        str(refused.value)
        == f"--nproc {asked}; it takes a whole number of processes, at least 1, or auto (from the "
        "plan, else one per GPU, else 1), or gpu (one per GPU); give one of those"
    )


def test_one_process_a_gpu_is_refused_without_a_gpu() -> None:
    with pytest.raises(LaunchError) as refused:
        count("gpu")
    assert (
        str(refused.value)
        == "--nproc gpu; it starts one process per GPU, and torch sees no GPU here; give a number,"
        " or auto"
    )


@pytest.mark.parametrize(("asked", "gpus"), [("3", 0), ("gpu", 3)])
def test_a_plan_that_does_not_multiply_to_the_number_is_refused(asked: str, gpus: int) -> None:
    with pytest.raises(
        PlanError,
        match=(
            "with 3 processes; the axes multiply to 2, and must multiply to the number of processes"
        ),
    ):
        count(asked, "replicate=2", gpus)
