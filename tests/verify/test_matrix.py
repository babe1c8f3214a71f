"""A cut of the matrix that `make verify` runs whole, and that nothing is missing from it unsaid."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from queue import SimpleQueue

import pytest
from matrix import MODELS, PRECISIONS, SCRIPT, STAGED, WHOLE, faults
from verify.pooled import run_script, verified

from lockstep.errors import RecipeError
from lockstep.testing.pool import WorkerPool
from lockstep.verify.twins import parse_plans

CUT = {
    ("gpt-dropout", "fp32"): ["replicate=2", "shard=2", "tensor=2", "pipeline=2", "split=2"],
    ("convolutions", "bf16"): ["replicate=3", "shard=2,pipeline=2"],
}
PARTIAL = [model for model, plans in MODELS.items() if not set(STAGED) <= set(plans)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("model", "precision"), CUT)
def test_a_cut_of_the_matrix_passes(pool: WorkerPool, model: str, precision: str) -> None:
    pools: SimpleQueue[WorkerPool] = SimpleQueue()
    pools.put(pool)
    exact = precision == "fp32"
    report = verified([SCRIPT, model, precision], CUT[model, precision], pools, steps=2, float64=exact, other_microbatch=exact)
    assert faults(report) == []
    assert len(report.verdicts) == len(CUT[model, precision])
    assert all(bool(verdict.float64) == exact for verdict in report.verdicts)
    assert report.recipe_checked == exact


def test_the_cut_is_one() -> None:
    assert all(precision in PRECISIONS and set(plans) <= set(MODELS[model]) for (model, precision), plans in CUT.items())


def test_every_model_is_in_the_matrix_with_plans_that_are_some() -> None:
    assert set(MODELS) == set(runpy.run_path(SCRIPT)["MODELS"])
    assert len(parse_plans(WHOLE + STAGED, bitwise=False)) == len(WHOLE + STAGED)


@pytest.mark.timeout(120)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed (pip install -e .[dev])")
@pytest.mark.parametrize("model", PARTIAL)
def test_what_the_matrix_leaves_out_is_refused(pool: WorkerPool, tmp_path: Path, model: str) -> None:
    given = {"LOCKSTEP_PLAN": "pipeline=2", "LOCKSTEP_RUN_DIR": str(tmp_path / "run")}
    with pytest.raises(RecipeError, match=r"(ForCausalLM|LMHeadModel)\).*no nn\.Sequential.*name them, as in Recipe\.stages"):
        pool.run(2, run_script, [SCRIPT, model], given, timeout_seconds=100)
