"""The cookbook: each training has one fingerprint on any number of processes and after a resume,
and passes verify."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from processes import LOCKSTEP, ran

import lockstep as ls
from lockstep.testing.pool import WorkerPool
from lockstep.training.training import Training

COOKBOOK = Path(__file__).resolve().parents[2] / "examples" / "cookbook"
NAMES = sorted(path.stem for path in COOKBOOK.glob("*.py"))
NEEDS = {"detection": "scipy", "lora": "peft", "mixtral": "transformers"}
VERIFY_OPTIONS = {"vision": ["--whole-microbatch-loss"]}
REFUSED = {("physics", "shard=2"): "a gradient that is itself differentiated .* use replicate"}
VERIFIED_TOO = {"long": ["context=2"]}
FAIL_AFTER = 6
"""Steps, of which a checkpoint has four."""

pytestmark = [pytest.mark.command, pytest.mark.timeout(120)]


def module(name: str) -> Any:
    if str(COOKBOOK) not in sys.path:
        sys.path.append(str(COOKBOOK))
    return importlib.import_module(name)


def train(name: str, run_dir: str, plan: str) -> str:
    fingerprint: str = module(name).train(**options(run_dir, plan))
    return fingerprint


def options(run_dir: str, plan: str) -> dict[str, Any]:
    return {
        "run_dir": run_dir,
        "plan": f"{plan},numerics=bitwise",
        "saving": ls.Saving(every=4),
    }


def train_and_fail(name: str, run_dir: str, plan: str) -> None:
    example, begin = module(name), Training.begin_step

    def begin_or_fail(training: Training, source: Any) -> None:
        if training.run.step == FAIL_AFTER:
            raise RuntimeError("lost")
        begin(training, source)

    with (
        patch.object(Training, "begin_step", begin_or_fail),
        pytest.raises(RuntimeError, match="lost"),
    ):
        example.train(**options(run_dir, plan))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COOKBOOK_DATA", str(tmp_path / "data"))
    if request.param in NEEDS:
        pytest.importorskip(NEEDS[request.param])
    if NEEDS.get(request.param) in ("peft", "transformers"):
        request.getfixturevalue("transformers_in_pool")
    chosen: str = request.param
    return chosen


def test_it_has_one_fingerprint_on_any_number_of_processes_and_after_a_resume(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    """Begun on two processes, which shard it where it can be sharded, and ended on three."""
    two = "replicate=2" if (name, "shard=2") in REFUSED else "shard=2"
    folder = str(tmp_path / "resumed")
    (alone,) = pool.run(1, train, name, str(tmp_path / "alone"), "replicate=1", timeout_seconds=60)
    pool.run(2, train_and_fail, name, folder, two, timeout_seconds=60)
    resumed = pool.run(3, train, name, folder, "replicate=3", timeout_seconds=60)
    assert set(resumed) == {alone}


@pytest.mark.parametrize(("training", "plan"), REFUSED)
def test_a_plan_under_which_it_cannot_train_is_refused(
    pool: WorkerPool, tmp_path: Path, training: str, plan: str
) -> None:
    with pytest.raises(ls.errors.PlanError, match=REFUSED[training, plan]):
        pool.run(2, train, training, str(tmp_path), plan, timeout_seconds=60)


def test_it_is_short_and_knows_the_public_face_alone(name: str) -> None:
    lines = (COOKBOOK / f"{name}.py").read_text().splitlines()
    assert 30 <= len(lines) <= 130
    assert [line for line in lines if "lockstep" in line and "import" in line] == [
        "import lockstep as ls"
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_passes_verify(tmp_path: Path, name: str) -> None:
    command = [
        LOCKSTEP,
        "verify",
        str(COOKBOOK / f"{name}.py"),
    ]
    plans = [plan for plan in ("replicate=2", "shard=2") if (name, plan) not in REFUSED]
    plans += VERIFIED_TOO.get(name, [])
    command += ["--plans", *plans, "--steps", "3", *VERIFY_OPTIONS.get(name, [])]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = ran(command, cwd=tmp_path, env=environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
