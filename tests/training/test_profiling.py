"""Some steps of a run under the profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from training.subjects import recipe

import lockstep as ls
from lockstep.testing.pool import WorkerPool


def profiled(run_dir: str, steps: str, plan: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_PROFILE", steps)
        return [event.name for event in ls.train(recipe(steps=6), run_dir=run_dir, plan=plan).events]


@pytest.mark.parametrize(
    ("plan", "exchange"),
    [("replicate=2", "shared:all_reduce"), ("shard=2", "shared:reduce_scatter"), ("shard=2,transport=torch", "gloo:all_gather")],
)
def test_each_rank_is_traced_and_all_are_put_on_one_clock(pool: WorkerPool, tmp_path: Path, plan: str, exchange: str) -> None:
    assert all(events.count("profiled") == 1 for events in pool.run(2, profiled, str(tmp_path / "run"), "steps=2:4", plan))
    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json", "rank-1.json", "summary.json", "trace.json.gz"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == [2, 4]
    for rank in summary["ranks"]:
        assert rank["exposed"] > 0
        assert 0 < rank["compute"] + rank["exposed"] < rank["whole"]
        assert rank["peak_bytes"] > 10**7
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    phases = {rank: [each for each in events if each.get("cat") == "phase" and each["pid"] == rank] for rank in (0, 1)}
    for several in phases.values():
        assert [each["name"] for each in several].count("exchange") == 2
    # Both ranks leave an exchange when it is over: on one clock, at about one time.
    ends = [next(each["ts"] + each["dur"] for each in several if each["name"] == "exchange") for several in phases.values()]
    whole = max(rank["whole"] for rank in summary["ranks"])
    assert abs(ends[0] - ends[1]) < whole * 1e6
    assert exchange in {each["name"] for each in events}


@pytest.mark.parametrize("steps", ["steps=4:9", "steps=20:22"])
def test_a_run_that_ends_before_the_last_of_the_steps_has_no_trace_and_says_so(
    tmp_path: Path, steps: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "profiled" not in profiled(str(tmp_path / "run"), steps, "replicate=1")
    assert not (tmp_path / "run" / "profile").exists()
    said = "no profile: the run did not go through all of steps {} to {}; ".format(*(("4", "8") if steps == "steps=4:9" else ("20", "21")))
    assert capfd.readouterr().err.count(said) == 1


class InTheWay(ls.Hook):
    def on_start(self, run: ls.Run) -> None:
        if run.context.world.rank == 0:
            (Path(run.context.recorder.path) / "profile").touch()


def profiled_in_vain(run_dir: str) -> tuple[int, list[tuple[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_PROFILE", "steps=2:4")
        result = ls.train(recipe(steps=6), run_dir=run_dir, hooks=[InTheWay()])
    return result.steps, [(event.name, event.details.get("reason")) for event in result.events if "profile" in event.name]


def test_a_trace_that_cannot_be_written_is_told_and_training_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    for steps, ((event, reason),) in pool.run(2, profiled_in_vain, str(tmp_path / "run")):
        assert (steps, event) == (6, "profile-failed")
        assert reason.startswith("rank 0: [Errno 20] Not a directory: ")
