"""A run that has ended goes on with more steps, and ends with the bits of a run that had them from the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from training.subjects import learned, recipe

import lockstep as ls
from lockstep.base.errors import RunDirectoryError
from lockstep.testing.pool import WorkerPool


def train(run_dir: str, steps: int, plan: str = "replicate=1", **options: Any) -> ls.Result:
    saving = ls.Saving(every=2)
    return ls.train(recipe(steps=steps), run_dir=run_dir, plan=f"{plan},numerics=bitwise", saving=saving, log_every=1, **options)


def extended(run_dir: str, plan: str) -> str:
    return train(run_dir, 7, plan, allow_change=["steps"]).fingerprint


@pytest.mark.parametrize(("plan", "ranks"), [("replicate=1", 1), ("replicate=2", 2), ("shard=2", 2)])
def test_it_goes_on_from_its_last_checkpoint_under_any_plan(pool: WorkerPool, tmp_path: Path, plan: str, ranks: int) -> None:
    whole, ended = train(str(tmp_path / "whole"), 7), train(str(tmp_path / "run"), 5)
    assert set(pool.run(ranks, extended, str(tmp_path / "run"), plan)) == {whole.fingerprint}
    assert [row["step"] for row in learned(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7]
    assert json.loads((tmp_path / "run" / "result-1.json").read_text())["fingerprint"] == ended.fingerprint
    assert json.loads((tmp_path / "run" / "result.json").read_text())["fingerprint"] == whole.fingerprint
    assert ls.fingerprint(load_file(tmp_path / "run" / "model-1.safetensors")) == ended.fingerprint


def test_it_goes_on_twice(tmp_path: Path) -> None:
    whole = train(str(tmp_path / "whole"), 7)
    train(str(tmp_path / "run"), 3)
    train(str(tmp_path / "run"), 5, allow_change=["steps"])
    assert train(str(tmp_path / "run"), 7, allow_change=["steps"]).fingerprint == whole.fingerprint
    assert {path.name for path in (tmp_path / "run").glob("result*")} == {"result.json", "result-1.json", "result-2.json"}


@pytest.mark.parametrize("options", [{}, {"allow_change": ["schedule"]}, {"allow_change": ["steps"], "resume": "never"}])
def test_it_does_not_go_on_unless_more_steps_are_allowed(tmp_path: Path, options: dict[str, Any]) -> None:
    train(str(tmp_path / "run"), 3)
    before = (tmp_path / "run" / "result.json").read_bytes()
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        train(str(tmp_path / "run"), 5, **options)
    assert (tmp_path / "run" / "result.json").read_bytes() == before
