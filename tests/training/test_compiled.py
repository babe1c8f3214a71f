"""`compile=yes` in whole runs: the model of one process whose code is not compiled, to rounding.
Needs a C++ compiler."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from training.subjects import Trained as TrainedMixture, off as off_mixture, recipe, squared_error
from training.test_balance import Trained, balance, off, train as train_balanced
from training.test_expert_axis import train as train_experts
from training.test_pipeline_axis import train_in_float64

import lockstep as ls
from lockstep.base.errors import PlanError
from lockstep.model.parallelize import _wrap_blocks
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the compiler takes half a minute a plan
PLANS = {"split=2": 1, "replicate=2": 2, "shard=2,checkpointing=full": 2, "pipeline=2": 2}
SECONDS = 250


@pytest.fixture(scope="module")
def compiling() -> Iterator[WorkerPool]:
    """Torch's compiler leaves threads and variables in the process that it ran in, and headers in a
    folder of the session's."""
    os.makedirs(default_cache_dir(), exist_ok=True)
    with WorkerPool(max_workers=2, check_leaks=False) as pool:
        yield pool


def train(plan: str, run_dir: str) -> tuple[float, dict[str, float]]:
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return train_in_float64(plan, run_dir)


@pytest.mark.parametrize("plan", PLANS)
def test_training_gives_the_model_of_one_process(
    compiling: WorkerPool, tmp_path: Path, plan: str
) -> None:
    """Four blocks, each compiled for two shapes, and for evaluation: more often than torch compiles
    code unless told to."""
    (alone,) = compiling.run(1, train, "replicate=1", str(tmp_path / "alone"))
    found = compiling.run(
        PLANS[plan], train, f"{plan},compile=yes", str(tmp_path / "run"), timeout_seconds=SECONDS
    )
    state, truth = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "alone"))
    torch.testing.assert_close(
        (found, state), ([alone] * PLANS[plan], truth), rtol=1e-9, atol=1e-11
    )


def train_mixture(plan: str, run_dir: str) -> TrainedMixture:
    small: dict[str, Any] = {"sequence": None, "global_batch": 4, "steps": 2, "evaluation": None}
    return train_experts(run_dir, plan, blocks=["blocks.*"], **small)


def test_blocks_are_compiled_around_their_experts(compiling: WorkerPool, tmp_path: Path) -> None:
    (alone,) = compiling.run(1, train_mixture, "replicate=1", str(tmp_path / "alone"))
    plan = "expert=2,compile=yes,checkpointing=full"
    run_dir = str(tmp_path / "run")
    for found in compiling.run(2, train_mixture, plan, run_dir, timeout_seconds=SECONDS):
        assert off_mixture(found, alone) < 1e-12


def balanced(plan: str, run_dir: str) -> list[Trained]:
    forms = balance(), balance(over="microbatch", per_layer=False)
    return [
        train_balanced(f"{run_dir}/{number}", plan, balance=form)
        for number, form in enumerate(forms)
    ]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_balance_of_experts_is_that_of_uncompiled_code(
    compiling: WorkerPool, tmp_path: Path, processes: int
) -> None:
    (alone,) = compiling.run(1, balanced, "replicate=1", str(tmp_path / "alone"))
    plan, folder = f"replicate={processes},compile=yes", str(tmp_path / "run")
    for found in compiling.run(processes, balanced, plan, folder, timeout_seconds=SECONDS):
        for mine, expected in zip(found, alone, strict=True):
            assert off(mine, expected) < 1e-12


def penalised(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    x = batch[1].clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return squared_error(model, batch) + slope.square().mean()


def train_by_slopes(plan: str, run_dir: str) -> int:
    return ls.train(recipe(loss=penalised), plan=plan, run_dir=run_dir).steps


@pytest.mark.parametrize("processes", [1, 2])
def test_a_gradient_that_is_differentiated_is_refused(
    compiling: WorkerPool, tmp_path: Path, processes: int
) -> None:
    plan = f"replicate={processes}"
    with pytest.raises(
        PlanError,
        match=r"torch\.compile cannot differentiate a gradient .*; leave compile=yes out$",
    ):
        compiling.run(
            processes,
            train_by_slopes,
            f"{plan},compile=yes",
            str(tmp_path / "compiled"),
            timeout_seconds=SECONDS,
        )
    assert compiling.run(processes, train_by_slopes, plan, str(tmp_path / "run")) == [2] * processes


class Overwritten(nn.Module):
    """A convolution whose result compiled code overwrites: the backward of sigmoid needs only that
    of sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sigmoid())  # type: ignore[no-any-return]


def gradients(plan: str) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(Overwritten()), torch.randn(2, 3, 8, 8, requires_grad=True)
    _wrap_blocks(model, ["0"], Plan.parse(plan))
    model(x).pow(2).sum().backward()
    return [leaf.grad for leaf in (x, *model.parameters()) if leaf.grad is not None]


def test_selective_checkpointing_keeps_no_results_that_compiled_code_overwrites(
    compiling: WorkerPool,
) -> None:
    (found,) = compiling.run(
        1, gradients, "compile=yes,checkpointing=selective", timeout_seconds=SECONDS
    )
    torch.testing.assert_close(found, gradients("replicate=1"), rtol=1e-4, atol=1e-4)
