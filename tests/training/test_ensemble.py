"""`ls.Ensemble`: several trained models that are evaluated as one."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from training.subjects import FEATURES, network, recipe, rows, squared_error

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.testing.pool import WorkerPool

Pair = namedtuple("Pair", ["one", "other"])


class Gives(nn.Module):
    """Its output is made by a function of the input and a number."""

    def __init__(self, number: float, make: Callable[[Tensor, float], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(number))
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x, self.weight.item())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("ensemble")
    return [
        ls.train(recipe(seed=seed), run_dir=str(folder / str(seed))).run_dir for seed in (1, 2, 3)
    ]


def measured(runs: list[str], run_dir: str, plan: str | None) -> dict[str, float]:
    evaluated = replace(
        recipe(),
        model=lambda: ls.Ensemble(network, runs),
        evaluation=ls.Evaluation(data=rows(13, seed=1)),
    )
    return ls.evaluate(evaluated, run_dir=run_dir, plan=plan)


def loaded(run: str) -> nn.Module:
    model = network()
    model.load_state_dict(load_file(Path(run) / "model.safetensors"))
    return model.eval()


@pytest.mark.parametrize(
    ("plan", "ranks"), [("replicate=1", 1), ("replicate=2", 2), ("shard=2", 2)]
)
def test_its_metrics_are_those_of_the_mean_output_under_every_plan(
    pool: WorkerPool, trained: list[str], tmp_path: Path, plan: str, ranks: int
) -> None:
    models = [loaded(run) for run in trained]
    data = list(rows(13, seed=1).tensors)

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (models[0](x) + models[1](x) + models[2](x)) / 3

    expected = squared_error(Mean(), data).item()
    assert expected != pytest.approx(squared_error(models[0], data).item(), rel=1e-3)
    found = pool.run(ranks, measured, trained, str(tmp_path / "run"), f"{plan},numerics=bitwise")
    (alone,) = pool.run(1, measured, trained, str(tmp_path / "alone"), "numerics=bitwise")
    assert found == [alone] * ranks
    assert alone["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_file_and_modules_are_members_too(trained: list[str]) -> None:
    x = torch.randn(5, FEATURES)
    models = [loaded(run) for run in trained]
    by_runs = ls.Ensemble(network, [trained[0], Path(trained[1]) / "model.safetensors", trained[2]])
    with torch.no_grad():
        assert torch.equal(by_runs(x), ls.Ensemble(models)(x))
    assert {name.split(".")[1] for name in by_runs.state_dict()} == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x, number: x * number, lambda x: x * 2),
        (
            lambda x, number: {"logits": x * number, "hidden": [x, None]},
            lambda x: {"logits": x * 2, "hidden": [x, None]},
        ),
        (lambda x, number: OrderedDict(logits=x * number), lambda x: OrderedDict(logits=x * 2)),
        (lambda x, number: (x, (x + number, "same")), lambda x: (x, (x + 2, "same"))),
        (
            lambda x, number: Pair(x * number, torch.tensor([3])),
            lambda x: Pair(x * 2, torch.tensor([3])),
        ),
    ],
)
def test_the_mean_is_of_each_tensor_in_an_output(
    make: Callable[..., Any], expected: Callable[..., Any]
) -> None:
    x = torch.arange(4.0)
    found, right = ls.Ensemble([Gives(1.0, make), Gives(3.0, make)])(x), expected(x)
    assert type(found) is type(right)
    assert str(found) == str(right)


def test_outputs_are_combined_by_a_function_of_their_list() -> None:
    ensemble = ls.Ensemble(
        [Gives(number, lambda x, number: x * number) for number in (1.0, 6.0, 3.0)],
        combine=lambda outputs: torch.stack(outputs).median(0).values,
    )
    assert ensemble(torch.ones(2)).tolist() == [3.0, 3.0]


def test_what_has_no_mean_is_refused() -> None:
    ensemble = ls.Ensemble(
        [Gives(number, lambda x, number: torch.tensor([int(number)])) for number in (1.0, 2.0)]
    )
    with pytest.raises(
        RecipeError,
        match="have a Tensor that differs between members; a mean is of floating-point tensors",
    ):
        ensemble(torch.ones(2))


def test_it_is_not_trained(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError,
        match=(
            r"an ls\.Ensemble in training mode; it is the mean of models that are already trained"
        ),
    ):
        ls.train(
            recipe(model=lambda: ls.Ensemble([network(), network()])), run_dir=str(tmp_path / "run")
        )


def test_weights_of_another_model_are_refused(trained: list[str]) -> None:
    with pytest.raises(RecipeError, match="are not this model's"):
        ls.Ensemble(lambda: network(width=8), trained)


def test_a_pickle_and_a_run_that_has_not_ended_are_refused(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    (tmp_path / "model.pt").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(
        RecipeError, match=r"its members are read from runs and \.safetensors files"
    ):
        ls.Ensemble(network, [tmp_path / "model.pt"])
    assert not (tmp_path / "executed").exists()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(RecipeError, match="is a run that has not ended"):
        ls.Ensemble(network, [tmp_path / "run"])


@pytest.mark.parametrize(
    "arguments",
    [
        (network,),
        (network, []),
        (network, "runs/a"),
        ([],),
        ([network],),
        ([nn.Linear(1, 1)], ["runs/a"]),
    ],
)
def test_other_arguments_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(
        RecipeError, match="it takes a function and a list of runs, or a list of modules"
    ):
        ls.Ensemble(*arguments)
