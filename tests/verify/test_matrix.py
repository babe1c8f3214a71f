"""A part of the matrix that `make verify` runs whole, and the plans that the matrix leaves out."""

from __future__ import annotations

import runpy
from pathlib import Path
from queue import SimpleQueue

import pytest
from matrix import EXPERTS, MODELS, PLANS, PRECISIONS, REFUSED, SCRIPT, faults, plans_of, too_far
from verify.pooled import run_script, verified

from lockstep.base.errors import UserError
from lockstep.testing.pool import WorkerPool
from lockstep.verify.jobs import parse_plans

PART = {
    ("gpt-dropout", "fp32"): ["tensor=2", "split=2"],
    ("perceptron-batchnorm", "bf16"): ["replicate=3"],
    ("mixture", "fp32"): ["shard=2,expert=2", "expert=2,context=2"],
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("model", "precision"), PART)
def test_a_part_of_the_matrix_passes(pool: WorkerPool, model: str, precision: str) -> None:
    pools: SimpleQueue[WorkerPool] = SimpleQueue()
    pools.put(pool)
    exact = precision == "fp32"
    report = verified(
        [SCRIPT, model, precision],
        PART[model, precision],
        pools,
        steps=2,
        float64=exact,
        check_microbatch_size=exact,
    )
    assert faults(report) == []
    assert model not in EXPERTS or too_far(report) == []
    assert len(report.verdicts) == len(PART[model, precision])
    assert all(bool(verdict.float64) == exact for verdict in report.verdicts)
    assert report.microbatch_size_checked == exact


def test_the_part_is_in_the_matrix() -> None:
    assert all(
        precision in PRECISIONS and set(plans) <= set(plans_of(model))
        for (model, precision), plans in PART.items()
    )


def test_every_model_is_in_the_matrix() -> None:
    assert set(MODELS) == set(runpy.run_path(SCRIPT)["MODELS"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("model", "plans", "words"), REFUSED)
@pytest.mark.slow
def test_combinations_outside_the_matrix_are_refused(
    pool: WorkerPool, tmp_path: Path, model: str, plans: list[str], words: str
) -> None:
    pytest.importorskip(
        "transformers", reason="transformers is not installed (pip install -e .[dev])"
    )
    assert set(plans) <= set(PLANS)
    ((plan, processes),) = parse_plans(plans[:1], bitwise=False)
    given = {"LOCKSTEP_PLAN": str(plan), "LOCKSTEP_RUN_DIR": str(tmp_path / "run")}
    with pytest.raises(UserError, match=words):
        pool.run(processes, run_script, [SCRIPT, model], given, timeout_seconds=100)
