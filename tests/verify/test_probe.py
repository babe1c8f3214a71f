"""The probe of `lockstep verify`: it writes the same trace under every plan, up to the step asked
for, and only if it is asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.subjects import FEATURES, OUTPUTS, network, recipe, rows, sgd
from verify.built import built

import lockstep as ls
from lockstep.evidence.tensors import distance
from lockstep.evidence.tolerance import MeasuredRounding
from lockstep.evidence.trace import Trace, read_traces
from lockstep.testing.pool import WorkerPool
from lockstep.training.context import Overrides
from lockstep.verify.causes.evidence import Evidence
from lockstep.verify.compare import compare_traces
from lockstep.verify.jobs import TraceRequest
from lockstep.verify.probe import TraceHook
from lockstep.verify.verification import likely_cause


class Seen(ls.Hook):
    """The steps that hooks were told of."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_step(self, run: Any) -> None:
        self.steps.append(run.step)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def errors(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return (output - batch[2]).abs().mean(1)


def summed(output: Tensor, batch: Sequence[Tensor]) -> ls.Loss:
    """Its weight is known only to the forward."""
    return ls.Loss(((output - batch[2]) ** 2).sum(), (batch[0] % 3 + 1).sum())


def train(plan: str, folder: str, changes: dict[str, Any], request: dict[str, Any]) -> list[int]:
    """As `lockstep verify` starts it. Returns what hooks saw before the process would have
    ended."""
    seen = Seen()
    made = recipe(
        **{
            "optimizer": adamw,
            "loss": summed,
            "inputs": lambda batch: batch[1],
            "steps": 5,
            **changes,
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TraceRequest(folder=Path(folder), **request).write(Path(folder)).items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit, check=lambda ended: ended.code == 0):
            ls.train(made, plan=plan, run_dir=f"{folder}/run", hooks=[seen])
    torch.set_default_dtype(torch.float32)
    return seen.steps


def traced(
    pool: WorkerPool, path: Path, processes: int, plan: str, **given: Any
) -> tuple[Trace, list[list[int]]]:
    folder = path / plan
    folder.mkdir(parents=True)
    seen = pool.run(processes, train, plan, str(folder), given.pop("changes", {}), given)
    (trace,) = read_traces(folder)
    return trace, seen


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_a_plan_writes_the_trace_that_one_process_writes(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    alone, _ = traced(
        pool, tmp_path, 1, "replicate=1,numerics=bitwise", steps=3, changes={"clip_norm": 0.1}
    )
    trace, seen = traced(
        pool, tmp_path, 2, f"{plan},numerics=bitwise", steps=3, changes={"clip_norm": 0.1}
    )
    assert seen == [[1, 2, 3]] * 2
    assert trace.steps == 3
    assert sorted(trace.ranks) == ([0, 1] if plan == "replicate=2" else [0])
    comparison = compare_traces(alone, trace, MeasuredRounding(alone, []), bitwise=True)
    assert (comparison.differences, comparison.largest) == ([], None)
    assert [m.rank for m in trace.microbatches_of(0)] == (
        [0, 0, 1, 1] if plan == "replicate=2" else [0, 1, 0, 1]
    )
    assert all((m.gradients is None) == (plan == "shard=2") for m in trace.microbatches)
    assert trace.metadata["microbatch"] == 4


@pytest.mark.parametrize(
    ("plan", "processes", "writers"),
    [("pipeline=2", 2, [0, 1]), ("replicate=2,pipeline=2", 4, [0, 2])],
)
def test_each_pipeline_stage_writes_its_part_of_the_model(
    pool: WorkerPool, tmp_path: Path, plan: str, processes: int, writers: list[int]
) -> None:
    alone, _ = traced(pool, tmp_path, 1, "replicate=1", steps=2, changes={"clip_norm": 0.1})
    trace, seen = traced(pool, tmp_path, processes, plan, steps=2, changes={"clip_norm": 0.1})
    assert seen == [[1, 2]] * processes
    comparison = compare_traces(alone, trace, MeasuredRounding(alone, []), bitwise=False)
    assert comparison.differences == []
    assert trace.rank_0.initial["parameters"].keys() == alone.rank_0.initial["parameters"].keys()
    assert {path.name for path in (tmp_path / plan).glob("step-00000-gradients-*")} == {
        f"step-00000-gradients-0-{rank}.safetensors" for rank in writers
    }
    exact, _ = traced(pool, tmp_path, processes, f"{plan},schedule=gpipe", steps=1, float64=True)
    assert {
        summary.dtype
        for summary in exact.rank_0.steps[0].tensors["gradients"].values()
        if summary is not None
    } == {"float64"}


def test_microbatches_add_up_to_the_gradient_that_is_written(
    pool: WorkerPool, tmp_path: Path
) -> None:
    norms = []
    for precision in ("fp32", "fp16"):
        trace, _ = traced(
            pool, tmp_path / precision, 1, "replicate=1", steps=1, changes={"precision": precision}
        )
        step = trace.rank_0.steps[0]
        parts = [m.gradients for m in trace.microbatches_of(0) if m.gradients is not None]
        for name, summary in step.tensors["gradients"].items():
            leaves = [leaf.projection for part in parts if (leaf := part[name]) is not None]
            assert len(leaves) == 4
            assert summary is not None
            assert step.gain * sum(leaves) == pytest.approx(
                summary.projection, rel=1e-3, abs=1e-3 * summary.norm
            )
            norms.append(summary.norm)
        assert step.gain != 1.0
    assert norms[4:] == pytest.approx(norms[:4], rel=1e-2)  # without the loss scale


def test_a_request_changes_the_run(pool: WorkerPool, tmp_path: Path) -> None:
    changes = {
        "precision": "bf16",
        "evaluation": ls.Evaluation(data=rows(8), every=1, metrics={"error": ls.Mean(errors)}),
    }
    overrides = {"steps": 1, "float64": True, "microbatch": 8, "eval_mode": True, "noise_seed": 1}
    trace, seen = traced(
        pool, tmp_path, 1, "replicate=1", **overrides, changes={"model": dropping, **changes}
    )
    plain, _ = traced(
        pool,
        tmp_path,
        1,
        "replicate=1,numerics=fast",
        steps=1,
        changes={"model": dropping, **changes},
    )
    assert seen == [[]]
    assert {
        name: trace.metadata[name] for name in ("precision", "microbatch", "short_dtype_operations")
    } == {
        "precision": "fp32",
        "microbatch": 8,
        "short_dtype_operations": [],
    }
    assert [m.drew_random_numbers for m in trace.microbatches] == [False, False]
    assert [m.drew_random_numbers for m in plain.microbatches] == [True] * 4
    perturbed, own = trace.rank_0.initial["parameters"], plain.rank_0.initial["parameters"]
    assert {summary.dtype for summary in perturbed.values() if summary is not None} == {"float64"}
    assert 0 < max(distance(perturbed[name], own[name]) for name in own) < 1e-13


def dropping() -> nn.Module:
    return nn.Sequential(network(), nn.Dropout(0.5))


def train_two(folder: Path) -> None:
    with ls.Session(run_dir=str(folder / "run")) as session:
        pairs = [session.prepare(network, sgd) for _ in range(2)]
        for step in session.steps(rows(48), global_batch=16, microbatch=4, steps=9):
            for model, optimizer in pairs:
                for batch in step.microbatches():
                    step.backward((model(batch[1]) - batch[2]).square().mean(), optimizer)
                step.commit(optimizer)


def test_two_models_have_one_trace_each_and_end_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TraceRequest(folder=tmp_path, steps=2).write(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        train_two(tmp_path)
    assert [
        (trace.module_index, trace.steps, len(trace.microbatches))
        for trace in read_traces(tmp_path)
    ] == [
        (0, 2, 8),
        (1, 2, 8),
    ]


class Scales(nn.Module):
    """Experts of vectors, which are not found by their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, FEATURES))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return (self.scale[index] * tokens[:, None] * weights[..., None]).sum(1)


class ScalesLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.scales = nn.Linear(FEATURES, 4), Scales()
        self.head = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.head(self.scales(x, index, weights))  # type: ignore[no-any-return]


def train_scales(folder: Path) -> None:
    with ls.Session(run_dir=str(folder / "run")) as session:
        model, optimizer = session.prepare(ScalesLayer, sgd, experts=["scales"])
        for step in session.steps(rows(8), global_batch=8, microbatch=4, steps=2):
            for batch in step.microbatches():
                step.backward((model(batch[1]) - batch[2]).square().mean())
            step.commit(optimizer)


def test_experts_that_a_session_names_are_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = TraceRequest(folder=tmp_path, steps=1, experts=True)
    for name, value in request.write(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        train_scales(tmp_path)
    (trace,) = read_traces(tmp_path)
    assert {index: list(trace.experts_of(index)[0]) for index in (0, 1)} == {
        0: ["scales"],
        1: ["scales"],
    }


def test_a_session_without_a_request_has_no_probe(tmp_path: Path) -> None:
    assert "LOCKSTEP_REQUEST" not in os.environ
    with ls.Session(run_dir=str(tmp_path / "run")) as session:
        assert session.context.overrides == Overrides()
        assert not any(isinstance(hook, TraceHook) for hook in session.run.training.hooks.all)


def log_in_a_loop(plan: str, folder: str, counts_dummies: bool) -> None:
    """Log, and get from all ranks, a number of the samples; with `counts_dummies` also of those of
    dummies."""
    with ls.Session(run_dir=f"{folder}/run", plan=plan) as session:
        model, optimizer = session.prepare(network, sgd)
        for step in session.steps(rows(48), global_batch=12, microbatch=4, steps=9):
            numbers = [torch.empty(0)]
            for batch in step.microbatches(dummies=True):
                step.backward((model(batch[1]) - batch[2]).square().mean())
                if counts_dummies or not step.is_dummy:
                    numbers.append(batch[0].float())
                session.mean(numbers[-1])  # plans differ in how many a rank makes
            step.commit(optimizer)
            gathered = session.gather(torch.cat(numbers))
            step.log({"mean": session.mean(torch.cat(numbers)), "rows": len(gathered)})


def trace_a_loop(plan: str, folder: str, counts_dummies: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TraceRequest(folder=Path(folder), steps=2).write(Path(folder)).items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit):
            log_in_a_loop(plan, folder, counts_dummies)


@pytest.mark.parametrize("numerics", ["fast", "bitwise"])
def test_what_a_script_logs_and_gathers_is_compared(
    pool: WorkerPool, tmp_path: Path, numerics: str
) -> None:
    traces = {}
    for name, size, plan, counts_dummies in [
        ("alone", 1, "shard=1", True),
        ("right", 2, "shard=2", False),
        ("wrong", 2, "shard=2", True),
    ]:
        (tmp_path / name).mkdir()
        pool.run(
            size, trace_a_loop, f"{plan},numerics={numerics}", str(tmp_path / name), counts_dummies
        )
        (traces[name],) = read_traces(tmp_path / name)
    rounding = MeasuredRounding(traces["alone"], [traces["alone"]])
    right, wrong = (
        compare_traces(traces["alone"], traces[name], rounding, bitwise=numerics == "bitwise")
        for name in ("right", "wrong")
    )
    assert right.passed
    assert sorted(traces["alone"].logged[0]) == ["mean", "rows", "rows of session.gather, call 1",
    "session.mean, call 1",
        "sum of session.gather, call 1"]  # fmt: skip
    first = wrong.differences[0]
    assert (first.step, first.check, first.name) == (0, "logged", "rows of session.gather, call 1")
    assert "counts dummies (step.is_dummy)" in (
        likely_cause(Evidence(traces["alone"], traces["wrong"], wrong.differences)) or ""
    )


def test_a_logged_value_that_one_process_does_not_repeat_is_not_compared() -> None:
    gradients = [{"w": torch.ones(2)}]
    alone, noisy, plan = built(gradients), built(gradients), built(gradients)
    for trace, seconds in ((alone, 1.0), (noisy, 1.1), (plan, 2.0)):
        trace.logged = {0: {"seconds": seconds, "accuracy": 0.5}}
    note = (
        "logged values that differ and were not compared, because one process may not repeat them:"
        " seconds"
    )
    for rounding in (MeasuredRounding(alone, [noisy]), MeasuredRounding(alone, [])):
        comparison = compare_traces(alone, plan, rounding, bitwise=False)
        assert (comparison.passed, comparison.notes) == (True, [note])
    plan.logged[0]["accuracy"] = 0.4
    assert (
        compare_traces(alone, plan, MeasuredRounding(alone, [noisy]), bitwise=False)
        .differences[0]
        .name
        == "accuracy"
    )
    del plan.logged[0]["accuracy"]
    assert (
        compare_traces(alone, plan, MeasuredRounding(alone, [noisy]), bitwise=False)
        .differences[0]
        .name
        == "accuracy"
    )
