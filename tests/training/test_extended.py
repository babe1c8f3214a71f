"""A run that has ended goes on with more steps, and ends with the bits of a run that had them from
the start."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import run_files
from safetensors.torch import load_file
from training.subjects import learned, recipe

import lockstep as ls
from lockstep.base.errors import CheckpointError, RunDirectoryError
from lockstep.testing.pool import WorkerPool


def train(run_dir: str, steps: int, plan: str = "replicate=1", **options: Any) -> ls.Result:
    saving = ls.Saving(every=2)
    return ls.train(
        recipe(steps=steps),
        run_dir=run_dir,
        plan=f"{plan},numerics=bitwise",
        saving=saving,
        log_every=1,
        **options,
    )


def extended(run_dir: str, plan: str) -> str:
    return train(run_dir, 7, plan, allow_change=["steps"]).fingerprint


@pytest.mark.parametrize(
    ("plan", "ranks"), [("replicate=1", 1), ("replicate=2", 2), ("shard=2", 2)]
)
def test_it_goes_on_from_its_last_checkpoint_under_any_plan(
    pool: WorkerPool, tmp_path: Path, plan: str, ranks: int
) -> None:
    whole, ended = train(str(tmp_path / "whole"), 7), train(str(tmp_path / "run"), 5)
    assert set(pool.run(ranks, extended, str(tmp_path / "run"), plan)) == {whole.fingerprint}
    assert [row["step"] for row in learned(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7]
    assert (
        json.loads((tmp_path / "run" / "result-1.json").read_text())["fingerprint"]
        == ended.fingerprint
    )
    assert run_files.fingerprint(tmp_path / "run") == whole.fingerprint
    assert ls.fingerprint(load_file(tmp_path / "run" / "model-1.safetensors")) == ended.fingerprint


def test_it_goes_on_twice(tmp_path: Path) -> None:
    whole = train(str(tmp_path / "whole"), 7)
    train(str(tmp_path / "run"), 3)
    train(str(tmp_path / "run"), 5, allow_change=["steps"])
    assert train(str(tmp_path / "run"), 7, allow_change=["steps"]).fingerprint == whole.fingerprint
    assert {path.name for path in (tmp_path / "run").glob("result*")} == {
        "result.json",
        "result-1.json",
        "result-2.json",
    }


@pytest.mark.parametrize(
    "options", [{}, {"allow_change": ["schedule"]}, {"allow_change": ["steps"], "resume": "never"}]
)
def test_it_does_not_go_on_unless_more_steps_are_allowed(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    train(str(tmp_path / "run"), 3)
    before = (tmp_path / "run" / "result.json").read_bytes()
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        train(str(tmp_path / "run"), 5, **options)
    assert (tmp_path / "run" / "result.json").read_bytes() == before


def loop(
    run_dir: Path,
    steps: int,
    *,
    global_batch: int = 8,
    allow_change: Sequence[str] = (),
    **options: Any,
) -> str:
    """A loop of the script's own, from a recipe's parts."""
    given = recipe()
    with ls.Session(run_dir=str(run_dir), seed=3, allow_change=allow_change, **options) as session:
        model, _ = session.prepare(given.model, given.optimizer)
        for step in session.steps(given.data, global_batch=global_batch, microbatch=4, steps=steps):
            for batch in step.microbatches():
                step.backward(given.objective(model, batch))
            step.commit()
        return ls.fingerprint(model)


def test_a_loop_of_the_scripts_own_goes_on_too(tmp_path: Path) -> None:
    whole = loop(tmp_path / "whole", 7)
    ended = loop(tmp_path / "run", 5)
    with pytest.raises(RunDirectoryError, match=r"go on with more steps \(--allow-change steps\)"):
        loop(tmp_path / "run", 7)
    assert loop(tmp_path / "run", 7, allow_change=["steps"]) == whole != ended
    assert json.loads((tmp_path / "run" / "result-1.json").read_text())["steps"] == 5
    assert run_files.result(tmp_path / "run")["steps"] == 7


def test_other_arguments_of_steps_are_refused_as_other_fields_of_a_recipe_are(
    tmp_path: Path,
) -> None:
    loop(tmp_path / "run", 5)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]["global_batch"] == 8
    with pytest.raises(CheckpointError, match=r"global_batch: 8, now 12; resume with that recipe"):
        loop(tmp_path / "run", 7, global_batch=12, allow_change=["steps"])
    with pytest.raises(CheckpointError, match=r"precision: 'fp32', now 'bf16'; resume"):
        loop(tmp_path / "run", 7, precision="bf16", allow_change=["steps"])
    assert run_files.result(tmp_path / "run")["steps"] == 5, (
        "a refused attempt leaves the result where it is"
    )
    loop(tmp_path / "run", 7, global_batch=12, allow_change=["steps", "global_batch"])


@pytest.mark.parametrize("train", [loop, train], ids=["session", "recipe"])
def test_a_field_that_there_is_not_is_refused_before_any_file_is_touched(
    tmp_path: Path, train: Callable[..., Any]
) -> None:
    train(tmp_path / "run" if train is loop else str(tmp_path / "run"), 3)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(CheckpointError, match=r"^allow_change='stepps'; it names "):
        train(
            tmp_path / "run" if train is loop else str(tmp_path / "run"),
            5,
            allow_change=["steps", "stepps"],
        )
    assert {
        path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()
    } == before
