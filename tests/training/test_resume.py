"""A run that was asked to end goes on as if it had not been, under its own plan or another; and
what it saved is the same for all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiers import paired, tiered
from training.kept import PLANS, STEPS, STOPPED_AT, restored, run
from training.subjects import learned

from lockstep.testing.pool import WorkerPool

BITWISE = {
    plan: processes
    for plan, processes in PLANS.items()
    if "tensor" not in plan and "pipeline" not in plan
}
"""Those that have bitwise numerics."""


@pytest.fixture(scope="module")
def undisturbed(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in bitwise numerics on one process."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    ((_, fingerprint),) = pool.run(1, run, "replicate=1,numerics=bitwise", str(path), None, {})
    (path / "fingerprint").write_text(fingerprint)
    return path


@pytest.fixture(scope="module")
def stopped(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of a run that was asked to end under a plan, and the fingerprint of its state
    then. Made once a plan."""
    made: dict[str, tuple[Path, str]] = {}

    def under(plan: str) -> tuple[Path, str]:
        if plan not in made:
            path = tmp_path_factory.mktemp("stopped") / "run"
            ended = pool.run(
                PLANS[plan.removesuffix(",numerics=bitwise")], run, plan, str(path), STOPPED_AT, {}
            )
            assert ended == [("preempted", ended[0][1])] * len(ended)
            made[plan] = path, ended[0][1]
        return made[plan]

    return under


@pytest.mark.parametrize("plan", tiered(PLANS, always=["pipeline=2"], most=0))
def test_in_fast_numerics_a_run_goes_on_bit_for_bit_under_its_own_plan(
    pool: WorkerPool, tmp_path: Path, stopped: Any, plan: str
) -> None:
    whole = pool.run(PLANS[plan], run, plan, str(tmp_path / "whole"), None, {})
    shutil.copytree(stopped(plan)[0], tmp_path / "run")
    assert pool.run(PLANS[plan], run, plan, str(tmp_path / "run"), None, {}) == whole
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_loss_scale_is_taken_up_too(pool: WorkerPool, tmp_path: Path, precision: str) -> None:
    whole = pool.run(2, run, "replicate=2", str(tmp_path / "whole"), None, {"precision": precision})
    assert (
        pool.run(
            2, run, "replicate=2", str(tmp_path / "run"), STOPPED_AT, {"precision": precision}
        )[0][0]
        == "preempted"
    )
    assert (
        pool.run(2, run, "replicate=2", str(tmp_path / "run"), None, {"precision": precision})
        == whole
    )


@pytest.mark.parametrize(("before", "after"), paired(BITWISE))
def test_in_bitwise_numerics_a_run_goes_on_under_any_plan_with_the_same_end(
    pool: WorkerPool, tmp_path: Path, undisturbed: Path, stopped: Any, before: str, after: str
) -> None:
    shutil.copytree(stopped(f"{before},numerics=bitwise")[0], tmp_path / "run")
    ended = pool.run(
        PLANS[after], run, f"{after},numerics=bitwise", str(tmp_path / "run"), None, {}
    )
    assert ended == [("ended", (undisturbed / "fingerprint").read_text())] * len(ended)
    assert [row["step"] for row in learned(tmp_path / "run")] == [
        row["step"] for row in learned(undisturbed)
    ]


@pytest.mark.parametrize(("before", "after"), paired(PLANS))
def test_parameters_and_optimizer_state_saved_under_any_plan_are_taken_up_under_any(
    pool: WorkerPool, tmp_path: Path, stopped: Any, before: str, after: str
) -> None:
    path, state = stopped(before)
    shutil.copytree(path, tmp_path / "run")
    assert pool.run(PLANS[after], restored, after, str(tmp_path / "run")) == [state] * PLANS[after]


def test_a_run_is_stopped_in_the_middle_of_an_epoch() -> None:
    assert (STOPPED_AT + 1) * 28 % 128
    assert STOPPED_AT + 1 < STEPS
