"""A run that was asked to end goes on as if it had not been, under its own plan or another; and
what it saved is the same for all."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tiers import tiered
from training.kept import PLANS, STEPS, STOPPED_AT, restored, run
from training.subjects import learned

from lockstep.testing.pool import WorkerPool

BITWISE = {
    f"{plan},numerics=bitwise": processes
    for plan, processes in PLANS.items()
    if "tensor" not in plan and "pipeline" not in plan
}
PROCESSES = PLANS | BITWISE
Pairs = list[tuple[str, str]]


def each_run(plans: list[str], folder: str, at: int | None, given: Any) -> list[tuple[str, str]]:
    return [run(plan, f"{folder}/{plan}", at, given) for plan in plans]


def each_after(pairs: Pairs, folder: str, restores: bool) -> list[Any]:
    """What comes of the runs that go on; or the state that they take up."""
    return [
        restored(after, f"{folder}/{before}/{after}")
        if restores
        else run(after, f"{folder}/{before}/{after}", None, {})
        for before, after in pairs
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the fingerprint of a run in bitwise numerics on one process."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    return path, run("replicate=1,numerics=bitwise", str(path), None, {})[1]


@pytest.fixture(scope="module")
def stopped(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Given plans, the directories of runs that were asked to end under them, and the fingerprints
    of their states then. Made once a plan, those of as many processes in one go."""
    made: dict[str, tuple[Path, str]] = {}

    def under(plans: Iterable[str]) -> dict[str, tuple[Path, str]]:
        missing = [plan for plan in plans if plan not in made]
        for processes in sorted({PROCESSES[plan] for plan in missing}):
            path = tmp_path_factory.mktemp("stopped")
            mine = [plan for plan in missing if PROCESSES[plan] == processes]
            ended = pool.run(processes, each_run, mine, str(path), STOPPED_AT, {})
            assert ended == [ended[0]] * processes
            assert {how for how, _ in ended[0]} == {"preempted"}
            made.update(
                (plan, (path / plan, state))
                for plan, (_, state) in zip(mine, ended[0], strict=True)
            )
        return made

    return under


def going_on(
    pool: WorkerPool, folder: Path, stopped: Any, pairs: Pairs, restores: bool
) -> dict[tuple[str, str], Any]:
    """What each rank finds, by the plans before and after."""
    made = stopped(dict.fromkeys(before for before, _ in pairs))
    for before, after in pairs:
        shutil.copytree(made[before][0], folder / before / after)
    found = {}
    for processes in sorted({PROCESSES[after] for _, after in pairs}):
        mine = [pair for pair in pairs if PROCESSES[pair[1]] == processes]
        ranks = pool.run(processes, each_after, mine, str(folder), restores)
        found.update(zip(mine, zip(*ranks, strict=True), strict=True))
    return found


def rounds(plans: dict[str, int]) -> list[Any]:
    """Lists of pairs to parametrize with: a ring of small plans, each before the next; and, slow,
    each other pair."""
    small = [plan for plan, processes in plans.items() if processes <= 2]
    ring = list(zip(small, [*small[1:], small[0]], strict=True))
    return [
        pytest.param(ring, id="ring"),
        *(
            pytest.param([pair], id="-".join(pair), marks=pytest.mark.slow)
            for pair in product(plans, plans)
            if pair not in ring
        ),
    ]


@pytest.mark.parametrize("plan", tiered(PLANS, always=["pipeline=2"], most=0))
def test_in_fast_numerics_a_run_goes_on_bit_for_bit_under_its_own_plan(
    pool: WorkerPool, tmp_path: Path, stopped: Any, plan: str
) -> None:
    whole = pool.run(PLANS[plan], run, plan, str(tmp_path / "whole"), None, {})
    found = going_on(pool, tmp_path, stopped, [(plan, plan)], False)
    assert list(found[plan, plan]) == whole
    assert learned(tmp_path / plan / plan) == learned(tmp_path / "whole")


def in_turn(folder: str, precision: str) -> list[tuple[str, str]]:
    """The whole run, one that is asked to end, and the same one the second time."""
    return [
        run("replicate=2", f"{folder}/{name}", at, {"precision": precision})
        for name, at in (("whole", None), ("run", STOPPED_AT), ("run", None))
    ]


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_the_loss_scale_is_taken_up_too(pool: WorkerPool, tmp_path: Path, precision: str) -> None:
    for whole, cut, ended in pool.run(2, in_turn, str(tmp_path), precision):
        assert cut[0] == "preempted"
        assert ended == whole


@pytest.mark.parametrize("pairs", rounds(BITWISE))
def test_in_bitwise_numerics_a_run_goes_on_under_any_plan_with_the_same_end(
    pool: WorkerPool, tmp_path: Path, undisturbed: tuple[Path, str], stopped: Any, pairs: Pairs
) -> None:
    path, fingerprint = undisturbed
    for (before, after), ended in going_on(pool, tmp_path, stopped, pairs, False).items():
        assert set(ended) == {("ended", fingerprint)}, (before, after)
        assert [row["step"] for row in learned(tmp_path / before / after)] == [
            row["step"] for row in learned(path)
        ], (before, after)


@pytest.mark.parametrize("pairs", rounds(PLANS))
def test_parameters_and_optimizer_state_saved_under_any_plan_are_taken_up_under_any(
    pool: WorkerPool, tmp_path: Path, stopped: Any, pairs: Pairs
) -> None:
    for (before, after), states in going_on(pool, tmp_path, stopped, pairs, True).items():
        assert set(states) == {stopped([])[before][1]}, (before, after)


def test_a_run_is_stopped_in_the_middle_of_an_epoch() -> None:
    assert (STOPPED_AT + 1) * 28 % 128
    assert STOPPED_AT + 1 < STEPS
