"""`data_parallel` on a CPU: one process whose threads share out the microbatches learns what it learns without them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from training.subjects import network, recipe, rows, sgd, squared_error

import lockstep as ls
from lockstep.base.errors import LossError, PlanError, RecipeError
from lockstep.comm.mesh import Mesh
from lockstep.launch.termination import Preempted
from lockstep.plan import Plan
from lockstep.training.set_up import Remark, remarks


def features(batch: Sequence[Tensor]) -> Tensor:
    return batch[1]


def error_of(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return ((output - batch[2]) ** 2).mean()


def known_to_the_forward(output: Tensor, batch: Sequence[Tensor]) -> ls.Loss:
    weights = 1.0 + (batch[0] % 3)
    return ls.Loss(((output - batch[2]) ** 2 * weights[:, None]).sum(), weights.sum())


def in_two_terms(output: Tensor, batch: Sequence[Tensor]) -> dict[str, Any]:
    return {"square": ls.Sum(((output - batch[2]) ** 2).sum()), "size": output.square().mean()}


def weights_of(result: ls.Result) -> dict[str, Tensor]:
    return load_file(Path(result.run_dir, "model.safetensors"))


EVALUATION = ls.Evaluation(data=rows(21, seed=9), microbatch=4, metrics={"first": ls.Mean(lambda output, batch: output[:, 0])})
RECIPES: dict[str, dict[str, Any]] = {
    "microbatches of the recipe": {},
    "microbatches of the plan": {"microbatch": None},
    "a short last batch": {"microbatch": 3, "epochs": 2, "data": rows(37)},
    "clipped, in bf16": {"clip_norm": 0.5, "precision": "bf16"},
    "a loss scale, in fp16": {"clip_norm": 0.5, "precision": "fp16"},
    "weights that the forward knows": {"loss": known_to_the_forward},
    "several terms": {"loss": in_two_terms, "weight": lambda batch: {"square": float(len(batch[0]))}},
    "a loss of the model": {"inputs": None, "loss": squared_error, "evaluation": None},
}


@pytest.mark.parametrize("changes", RECIPES.values(), ids=list(RECIPES))
@pytest.mark.parametrize("threads", [2, 3])
def test_the_model_is_that_of_one_thread(tmp_path: Path, changes: dict[str, Any], threads: int) -> None:
    given = recipe(**{"inputs": features, "loss": error_of, "evaluation": EVALUATION, **changes})
    expected, found = (
        ls.train(given, plan=plan, run_dir=str(tmp_path / plan)) for plan in ("replicate=1", f"data_parallel={threads},threads=2")
    )
    near = {"rtol": 2e-2, "atol": 2e-3} if "precision" in changes else {"rtol": 1e-5, "atol": 1e-6}
    assert found.loss == pytest.approx(expected.loss, rel=near["rtol"])
    assert found.metrics == pytest.approx(expected.metrics, rel=near["rtol"])
    torch.testing.assert_close(weights_of(found), weights_of(expected), **near)


@pytest.mark.parametrize("plan", ["replicate=1", "data_parallel=2"])
def test_a_second_compute_in_a_step_is_refused(tmp_path: Path, plan: str) -> None:
    with ls.Session(run_dir=str(tmp_path / "run"), plan=plan) as session:
        session.prepare(network, sgd)
        for step in session.steps(rows(16), global_batch=8, microbatch=4, steps=1):
            step.compute(features, error_of)
            with pytest.raises(LossError, match=r"step 0: a second step.compute; one computes all microbatches"):
                step.compute(features, error_of)
            step.commit()


def test_a_metric_that_draws_draws_what_it_does_on_one_thread(tmp_path: Path) -> None:
    evaluation = ls.Evaluation(data=rows(21), microbatch=4, metrics={"drawn": ls.Mean(lambda output, batch: torch.rand(len(output)))})
    given = recipe(inputs=features, loss=error_of, evaluation=evaluation)
    one, two = (ls.train(given, plan=plan, run_dir=str(tmp_path / plan)) for plan in ("replicate=1", "data_parallel=2"))
    assert one.metrics["drawn"] == two.metrics["drawn"]


class Counting(nn.Module):
    """It counts its forwards in an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.count = network(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += not self.training
        found: Tensor = self.body(x)
        return found


def test_what_a_forward_sets_in_an_evaluation_is_refused_too(tmp_path: Path) -> None:
    given = recipe(model=Counting, inputs=features, loss=error_of, evaluation=EVALUATION)
    with pytest.raises(RecipeError, match="the model's forward sets 'count' of the model"):
        ls.train(given, plan="data_parallel=2", run_dir=str(tmp_path / "run"))


def test_two_runs_have_one_fingerprint(tmp_path: Path) -> None:
    found = {ls.train(recipe(), plan="data_parallel=3", run_dir=str(tmp_path / str(run))).fingerprint for run in range(2)}
    assert len(found) == 1


def test_it_goes_on_from_a_save_under_another_plan(tmp_path: Path) -> None:
    whole = ls.train(recipe(steps=4), run_dir=str(tmp_path / "whole"))

    class Asked(ls.Hook):
        def on_step(self, run: Any) -> None:
            if run.step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(Preempted):
        ls.train(recipe(steps=4), plan="data_parallel=2", run_dir=str(tmp_path / "cut"), hooks=[Asked()])
    found = ls.train(recipe(steps=4), run_dir=str(tmp_path / "cut"))
    said = [json.loads(line) for line in Path(found.run_dir, "events.jsonl").read_text().splitlines()]
    assert ["data_parallel=2" in event["saved_under"] for event in said if event["event"] == "resumed"] == [True]
    torch.testing.assert_close(weights_of(found), weights_of(whole), rtol=1e-5, atol=1e-6)


class Unwound(nn.Module):
    """Dropout that only draws in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.dropout = network(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.dropout(self.body(x))
        return found


@pytest.mark.parametrize(
    ("plan", "changes", "kind", "text"),
    [
        ("data_parallel=2", {"model": Unwound}, RecipeError, "data_parallel=2, and the model's forward or the loss draws random numbers"),
        ("data_parallel=5", {}, RecipeError, "data_parallel=5 and 4 microbatches in a step; each thread computes one of its own"),
        ("data_parallel=2", {"microbatch": 16}, RecipeError, "data_parallel=2 and 1 microbatch in a step; each thread computes one"),
        ("data_parallel=2,threads=auto", {}, PlanError, "data_parallel=2 with threads=auto; what is timed is one microbatch at a time"),
    ],
)
def test_what_threads_cannot_compute_is_refused(
    tmp_path: Path, plan: str, changes: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        ls.train(recipe(**changes), plan=plan, run_dir=str(tmp_path / "run"))
    assert str(caught.value).startswith(text)


def test_a_loop_over_microbatches_is_told_to_compute_and_a_second_model_is_refused(tmp_path: Path) -> None:
    with ls.Session(run_dir=str(tmp_path / "run"), plan="data_parallel=2") as session:
        session.prepare(network, sgd)
        with pytest.raises(RecipeError, match=r"a second session.prepare with data_parallel=2 on a CPU; .* use replicate=2"):
            session.prepare(network, sgd)
        for step in session.steps(rows(16), global_batch=8, microbatch=4, steps=1):
            for refused in (lambda: next(step.microbatches()), lambda: step.backward(torch.ones(()))):  # noqa: B023
                with pytest.raises(RecipeError, match=r"step.backward with data_parallel=2 on a CPU; .* call step.compute"):
                    refused()
            step.compute(features, error_of)
            step.commit()


@pytest.mark.parametrize("given", [1, 4])
def test_the_threads_of_the_process_are_shared_out(tmp_path: Path, given: int) -> None:
    seen: list[int] = []

    def loss(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
        seen.append(torch.get_num_threads())
        return error_of(output, batch)

    ls.train(recipe(inputs=features, loss=loss), plan=f"data_parallel=2,threads={given}", run_dir=str(tmp_path / "run"))
    assert seen == [max(1, given // 2)] * 8


def test_forwards_run_in_the_runs_precision_and_an_evaluation_keeps_no_graph(tmp_path: Path) -> None:
    seen: set[tuple[torch.dtype, bool]] = set()

    def loss(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
        seen.add((output.dtype, output.requires_grad))
        return error_of(output, batch)

    given = recipe(inputs=features, loss=loss, precision="bf16", evaluation=ls.Evaluation(data=rows(8)))
    ls.train(given, plan="data_parallel=2", run_dir=str(tmp_path / "run"))
    assert seen == {(torch.bfloat16, True), (torch.bfloat16, False)}


def test_on_gpus_a_run_says_that_replicate_is_better() -> None:
    """Not on a CPU, where threads are as fast."""

    def remarked(device: str) -> list[Remark]:
        mesh = cast(Mesh, SimpleNamespace(apart={}, world=SimpleNamespace(device=torch.device(device))))
        return list(remarks(Plan(data_parallel=2), mesh, "fp32"))

    (remark,) = remarked("cuda")
    assert (remark.event, remark.details["gpus"]) == ("data-parallel", 2)
    assert remark.line == f"warning: data_parallel=2; {remark.details['better']}"
    assert remark.details["better"].startswith("replicate=2, one process a GPU, is faster")
    assert remarked("cpu") == []
