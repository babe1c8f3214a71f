"""Some steps of a run under the profiler: where the time goes, and the memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training.subjects import FEATURES, OUTPUTS, recipe, rows

import lockstep as ls
from lockstep.hooks.profiling import trace as traces
from lockstep.testing.pool import WorkerPool


def profiled(run_dir: str, steps: str, plan: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_PROFILE", steps)
        return [
            event.name for event in ls.train(recipe(steps=6), run_dir=run_dir, plan=plan).events
        ]


@pytest.mark.parametrize(
    ("plan", "exchange"),
    [
        ("replicate=2", "shared:all_reduce"),
        ("shard=2", "shared:reduce_scatter"),
        ("shard=2,transport=torch", "gloo:all_gather"),
    ],
)
def test_each_rank_is_traced_and_all_are_put_on_one_clock(
    pool: WorkerPool, tmp_path: Path, plan: str, exchange: str
) -> None:
    assert all(
        events.count("profiled") == 1
        for events in pool.run(2, profiled, str(tmp_path / "run"), "steps=2:4", plan)
    )
    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "memory.json",
        "rank-0.json",
        "rank-1.json",
        "summary.json",
        "trace.json.gz",
    ]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == [2, 4]
    for rank in summary["ranks"]:
        assert rank["exposed"] > 0
        assert 0 < rank["compute"] + rank["exposed"] < rank["whole"]
        assert rank["peak_bytes"] > 10**7
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    phases = {
        rank: [each for each in events if each.get("cat") == "phase" and each["pid"] == rank]
        for rank in (0, 1)
    }
    for several in phases.values():
        assert [each["name"] for each in several].count("exchange") == 2
    # Both ranks leave an exchange when it is over: on one clock, at about one time.
    ends = [
        next(each["ts"] + each["dur"] for each in several if each["name"] == "exchange")
        for several in phases.values()
    ]
    whole = max(rank["whole"] for rank in summary["ranks"])
    assert abs(ends[0] - ends[1]) < whole * 1e6
    assert exchange in {each["name"] for each in events}


@pytest.mark.parametrize("steps", ["steps=4:9", "steps=20:22"])
def test_a_run_that_ends_before_the_last_of_the_steps_has_no_trace_and_says_so(
    tmp_path: Path, steps: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "profiled" not in profiled(str(tmp_path / "run"), steps, "replicate=1")
    assert not (tmp_path / "run" / "profile").exists()
    said = "no profile: the run did not go through all of steps {} to {}; ".format(
        *(("4", "8") if steps == "steps=4:9" else ("20", "21"))
    )
    assert capfd.readouterr().err.count(said) == 1


def test_a_run_that_fails_has_its_own_reason_why_there_is_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_PROFILE", "steps=0:2")
    with pytest.raises(RuntimeError, match="ends here"):
        ls.train(recipe(loss=refuse), run_dir=str(tmp_path / "run"), plan="replicate=1")
    assert "no profile" not in capfd.readouterr().err


def refuse(output: Any, batch: Any) -> Any:
    raise RuntimeError("ends here")


class InTheWay(ls.Hook):
    def on_start(self, run: ls.Run) -> None:
        if run.context.world.rank == 0:
            (Path(run.context.recorder.path) / "profile").touch()


def profiled_in_vain(run_dir: str) -> tuple[int, list[tuple[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_PROFILE", "steps=2:4")
        result = ls.train(recipe(steps=6), run_dir=run_dir, hooks=[InTheWay()])
    return result.steps, [
        (event.name, event.details.get("reason"))
        for event in result.events
        if "profile" in event.name
    ]


def test_a_trace_that_cannot_be_written_is_told_and_training_goes_on(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for steps, ((event, reason),) in pool.run(2, profiled_in_vain, str(tmp_path / "run")):
        assert (steps, event) == (6, "profile-failed")
        assert reason.startswith("rank 0: [Errno 20] Not a directory: ")


WIDTH = 64
MICROBATCH = 128


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS + 1))


def inputs(batch: list[torch.Tensor]) -> tuple[torch.Tensor]:
    return (batch[1],)


def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    return ((output[:, :OUTPUTS] - batch[2]) ** 2).mean()


def memory_of(run_dir: str, plan: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_PROFILE", "steps=1:3")
        patch.setattr(traces, "MOST_POINTS", 10**9)  # every moment
        changes = {
            "model": wide,
            "data": rows(4 * MICROBATCH),
            "inputs": inputs,
            "loss": loss,
            "steps": 3,
        }
        ls.train(
            recipe(**changes, global_batch=2 * MICROBATCH, microbatch=MICROBATCH),
            run_dir=run_dir,
            plan=plan,
        )


PARAMETERS = 4 * (FEATURES * WIDTH + WIDTH + WIDTH * (OUTPUTS + 1) + OUTPUTS + 1)
ADAMW_STEPS = 4 * 4
"""Bytes of the step counts of four parameters."""
SAVED = 4 * (MICROBATCH * WIDTH + MICROBATCH * OUTPUTS)
"""Bytes that a forward leaves for its backward: the output of Tanh, and the differences that are
squared."""
LOSS = 4


def memory_in(run_dir: Path) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = json.loads((run_dir / "profile" / "memory.json").read_text())[
        "ranks"
    ]
    return ranks


def test_the_bytes_of_each_cause_are_those_of_arithmetic(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    memory_of(str(tmp_path), "replicate=1")
    (rank,) = memory_in(tmp_path)
    sizes = rank["bytes_by_cause"]
    assert set(sizes["parameters"]) == {PARAMETERS}
    assert set(sizes["optimizer state"]) == {2 * PARAMETERS + ADAMW_STEPS}
    assert max(sizes["gradients"]) == sizes["gradients"][-1] == PARAMETERS
    # At the second microbatch's forward, the loss of the first is still there.
    assert max(sizes["activations"]) == SAVED + 2 * LOSS
    assert rank["peak_phase"] == "backward"
    assert (
        rank["peak_bytes"]
        == sum(rank["at_peak"].values())
        == max(map(sum, zip(*sizes.values(), strict=True)))
    )
    assert rank["at_peak"]["activations"] >= 4 * MICROBATCH * WIDTH
    assert [
        4 * MICROBATCH * WIDTH,
        "activations",
        f"output of 1 {MICROBATCH}x{WIDTH} float32",
    ] in rank["largest"]
    assert [
        4 * FEATURES * WIDTH,
        "optimizer state",
        f"exp_avg of 0.weight {WIDTH}x{FEATURES} float32",
    ] in rank["largest"]
    assert any(
        cause == "rest" and "Backward0, aten::" in name for _, cause, name in rank["largest"]
    )
    said = capfd.readouterr().err
    assert "memory at its peak" in said
    assert f"output of 1 {MICROBATCH}x{WIDTH} float32" in said


def test_ranks_that_share_a_model_hold_half_of_it_each(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, memory_of, str(tmp_path), "shard=2")
    for rank in memory_in(tmp_path):
        sizes = rank["bytes_by_cause"]
        assert min(sizes["parameters"]) == sizes["parameters"][-1] == PARAMETERS // 2
        assert max(sizes["parameters"]) >= PARAMETERS + PARAMETERS // 2, "gathered for the forward"
        assert set(sizes["optimizer state"]) == {PARAMETERS + ADAMW_STEPS}
        assert sizes["gradients"][-1] == PARAMETERS // 2


def test_a_stage_of_a_pipeline_has_the_memory_of_its_own_layers(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(2, memory_of, str(tmp_path), "pipeline=2")
    ranks = memory_in(tmp_path)
    held = [set(rank["bytes_by_cause"]["parameters"]) for rank in ranks]
    assert all(len(each) == 1 for each in held)
    assert sum(map(max, held)) == PARAMETERS
    assert all(
        max(rank["bytes_by_cause"]["gradients"]) == max(each)
        for rank, each in zip(ranks, held, strict=True)
    )
    assert all(
        max(rank["bytes_by_cause"]["activations"]) >= 4 * MICROBATCH * WIDTH for rank in ranks
    )
