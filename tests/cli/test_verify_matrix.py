"""`lockstep verify` on right recipes, whole: no plan fails. Some minutes for all of them."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from processes import LOCKSTEP, ran

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent.parent / "scripts" / "recipes.py"
PLANS = ["replicate=2", "replicate=3", "replicate=4"]
BITWISE = ["replicate=2,numerics=bitwise", "replicate=3,numerics=bitwise"]
MICROBATCH_OF_THE_PLAN = "microbatches of the plan"
"""Which bitwise plans refuse."""


def names() -> list[str]:
    spec = importlib.util.spec_from_file_location("recipes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.RECIPES)


@pytest.mark.parametrize("name", names())
def test_right_plans_raise_no_alarm(tmp_path: Path, name: str) -> None:
    plans = PLANS if name == MICROBATCH_OF_THE_PLAN else PLANS + BITWISE
    ended = ran(
        [LOCKSTEP, "verify", str(SCRIPT), name, "--plans", *plans, "--steps", "5", "--json"],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.stderr == ""
    report = json.loads(ended.stdout)
    assert [
        (plan["plan"], plan["mismatch"]) for plan in report["plans"] if not plan["passed"]
    ] == []
    assert report["microbatch_size"]["mismatch"] is None
    assert ended.returncode == 0
    assert all(plan["float64"] for plan in report["plans"] if plan["criterion"] == "tolerance")
    assert all(
        plan["largest"] is None for plan in report["plans"] if plan["criterion"] == "bitwise"
    )
