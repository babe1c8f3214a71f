"""A loss that is a module: its parameters are trained, saved and sharded with the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from training.subjects import EachState, adamw, network, recipe, rows

import lockstep as ls
from lockstep.base.errors import PlanError, RecipeError
from lockstep.testing.pool import WorkerPool

PLANS = {"replicate=2": 2, "replicate=3": 3, "shard=2": 2}


class Uncertainty(nn.Module):
    """Two errors, weighted by learned variances (Kendall, Gal and Cipolla, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.tensor([0.5, -0.5]))

    def forward(self, output: Tensor, batch: list[Tensor]) -> Tensor:
        errors = torch.stack([((output - batch[2]) ** 2).mean(), (output - batch[2]).abs().mean()])
        return (errors * torch.exp(-self.log_variances) + self.log_variances).sum()


def inputs(batch: list[Tensor]) -> Tensor:
    return batch[1]


def uncertain(**changes: Any) -> ls.Recipe:
    return recipe(
        **{"inputs": inputs, "loss": Uncertainty(), "optimizer": adamw, "steps": 5, **changes}
    )


def train(run_dir: str, plan: str) -> str:
    given = uncertain(clip_norm=1.0, evaluation=ls.Evaluation(data=rows(7)))
    return ls.train(given, run_dir=run_dir, plan=f"{plan},numerics=bitwise").fingerprint


def test_its_parameters_learn_and_are_in_the_model(tmp_path: Path) -> None:
    initial = EachState()
    result = ls.train(
        uncertain(evaluation=ls.Evaluation(data=rows(7))),
        run_dir=str(tmp_path / "run"),
        hooks=[initial],
    )
    final = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(initial.states[0]["loss_module.log_variances"], torch.tensor([0.5, -0.5]))
    assert not torch.equal(
        final["loss_module.log_variances"], initial.states[0]["loss_module.log_variances"]
    )
    model, loss = network(), Uncertainty()
    model.load_state_dict(
        {name: value for name, value in final.items() if not name.startswith("loss_module.")}
    )
    loss.load_state_dict({"log_variances": final["loss_module.log_variances"]})
    with torch.no_grad():
        expected = loss(model(rows(7).tensors[1]), list(rows(7).tensors)).item()
    assert result.metrics["loss"] == pytest.approx(expected, rel=1e-5), (
        "the evaluation uses the learned ones"
    )


@pytest.mark.parametrize("plan", PLANS)
def test_the_bits_are_those_of_one_process(pool: WorkerPool, tmp_path: Path, plan: str) -> None:
    (alone,) = pool.run(1, train, str(tmp_path / "alone"), "replicate=1")
    assert set(pool.run(PLANS[plan], train, str(tmp_path / "run"), plan)) == {alone}


def test_the_module_that_was_given_stays_as_it_is(tmp_path: Path) -> None:
    loss = Uncertainty()
    ls.train(uncertain(loss=loss), run_dir=str(tmp_path / "run"))
    assert loss.log_variances.tolist() == [0.5, -0.5]


class HasOne(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*network())
        self.loss_module = 3


def test_a_model_with_that_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match="the model has a 'loss_module' already; rename that attribute"
    ):
        ls.train(uncertain(model=HasOne), run_dir=str(tmp_path / "run"))


def with_a_pipeline(run_dir: str) -> str:
    with pytest.raises((RecipeError, PlanError)) as raised:
        ls.train(uncertain(), run_dir=run_dir, plan="pipeline=2")
    return str(raised.value)


def test_a_pipeline_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    for message in pool.run(2, with_a_pipeline, str(tmp_path / "run")):
        assert message.startswith(
            "pipeline=2 with a loss that is a module with parameters; stages hold all parameters"
        )


def test_a_loss_module_without_parameters_is_a_function(tmp_path: Path) -> None:
    class Error(nn.Module):
        def forward(self, output: Tensor, batch: list[Tensor]) -> Tensor:
            return ((output - batch[2]) ** 2).mean()

    result = ls.train(uncertain(loss=Error()), run_dir=str(tmp_path / "run"))
    assert "loss_module" not in " ".join(load_file(Path(result.run_dir, "model.safetensors")))
