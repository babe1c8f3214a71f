"""Several evaluations of one recipe, each with its own data, loss, weights and steps; evaluation
without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import l1_loss
from training.subjects import recipe, rows, squared_error

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.testing.pool import WorkerPool

STEPS = 6


def absolute_error(model: torch.nn.Module, batch: list[Tensor]) -> Tensor:
    return l1_loss(model(batch[1]), batch[2])


def evaluations() -> dict[str, ls.Evaluation]:
    return {
        "valid": ls.Evaluation(data=rows(13, seed=1), every=2),
        "test": ls.Evaluation(data=rows(7, seed=2), every=3, loss=absolute_error),
        "last": ls.Evaluation(data=rows(7, seed=2), loss=absolute_error, weights="average"),
    }


class Seen(ls.Hook):
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def after_evaluation(self, run: Any, metrics: Mapping[str, float]) -> None:
        self.seen.append((run.step, dict(metrics)))


def train(
    run_dir: str, plan: str | None = None, **options: Any
) -> tuple[ls.Result, list[tuple[int, dict[str, float]]]]:
    seen = Seen()
    result = ls.train(
        recipe(steps=STEPS, evaluation=evaluations()),
        run_dir=run_dir,
        plan=plan,
        hooks=[ls.ExponentialMovingAverage(0.5), seen],
        **options,
    )
    return result, seen.seen


def measured_again(run_dir: str, weights: str, plan: str | None) -> dict[str, float]:
    return ls.evaluate(
        recipe(steps=STEPS, evaluation=evaluations()), weights, run_dir=run_dir, plan=plan
    )


def test_each_is_measured_at_its_own_steps_and_all_at_the_end(tmp_path: Path) -> None:
    result, seen = train(str(tmp_path / "run"))
    assert [(step, list(metrics)) for step, metrics in seen] == [
        (2, ["valid/loss"]),
        (3, ["test/loss"]),
        (4, ["valid/loss"]),
        (6, ["valid/loss", "test/loss"]),
        (6, ["last/loss"]),
    ]
    assert result.metrics == {
        name: value for _, metrics in seen[-2:] for name, value in metrics.items()
    }


def test_the_metrics_are_those_of_the_data_the_loss_and_the_weights_that_each_names(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    result, _ = train(str(tmp_path / "run"))
    model = recipe().model()
    for name, loss, data, file in (
        ("valid", squared_error, rows(13, seed=1), "model.safetensors"),
        ("test", absolute_error, rows(7, seed=2), "model.safetensors"),
        ("last", absolute_error, rows(7, seed=2), "model_average.safetensors"),
    ):
        model.load_state_dict(load_file(tmp_path / "run" / file))
        assert result.metrics[f"{name}/loss"] == pytest.approx(
            loss(model.eval(), list(data.tensors)).item(), rel=1e-5
        ), name


@pytest.mark.parametrize(
    ("plan", "ranks"), [("replicate=2", 2), ("replicate=3", 3), ("shard=2", 2)]
)
def test_they_are_the_same_under_every_plan(
    pool: WorkerPool, tmp_path: Path, plan: str, ranks: int
) -> None:
    (alone,) = pool.run(1, train, str(tmp_path / "alone"), "numerics=bitwise")
    for result, seen in pool.run(ranks, train, str(tmp_path / "run"), f"{plan},numerics=bitwise"):
        assert (result.metrics, seen) == (alone[0].metrics, alone[1])


@pytest.mark.parametrize(
    ("plan", "ranks"), [("replicate=1", 1), ("replicate=2", 2), ("shard=2", 2)]
)
def test_evaluate_measures_weights_as_the_run_did(
    pool: WorkerPool, tmp_path: Path, plan: str, ranks: int
) -> None:
    result, _ = train(str(tmp_path / "run"))
    weights = str(tmp_path / "run" / "model.safetensors")
    for metrics in pool.run(ranks, measured_again, str(tmp_path / "again"), weights, plan):
        assert metrics["valid/loss"] == pytest.approx(result.metrics["valid/loss"], rel=1e-6)
        assert metrics["last/loss"] == metrics["test/loss"], (
            "the given weights are measured, not an average that there is not"
        )


def test_the_best_checkpoint_is_that_of_the_metric_of_one_of_them(tmp_path: Path) -> None:
    result, seen = train(str(tmp_path / "run"), saving=ls.Saving(best="test/loss"))
    values = {step: metrics["test/loss"] for step, metrics in seen if "test/loss" in metrics}
    assert result.best is not None
    assert (result.best.value, result.best.step) == min(
        (value, step) for step, value in values.items()
    )


class Counts(ls.Hook):
    steps = 0

    def after_step(self, run: Any) -> None:
        self.steps = run.step


class Adds(Counts):
    """Adds a metric of this name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def after_evaluation(self, run: Any, metrics: dict[str, float]) -> None:
        metrics[self.name] = float(run.step)


@pytest.mark.parametrize("follows", ["stopping", "best", "schedule"])
def test_a_metric_that_a_hook_adds_may_be_followed(tmp_path: Path, follows: str) -> None:
    def trained(adds: str) -> int:
        hook = Adds(adds)
        hooks = [hook, *([ls.EarlyStopping("f1", mode="max")] if follows == "stopping" else [])]
        saving = ls.Saving(best="f1") if follows == "best" else None
        schedule = ls.OnMetric(
            "f1",
            lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max"),
        )
        evaluated = {
            "evaluation": ls.Evaluation(data=rows(5), every=2),
            **({"schedule": schedule} if follows == "schedule" else {}),
        }
        ls.train(
            recipe(steps=4, **evaluated), run_dir=str(tmp_path / adds), hooks=hooks, saving=saving
        )
        return hook.steps

    assert trained("f1") == 4
    with pytest.raises(
        RecipeError,
        match=r"'f1'.*, which is not measured; measured are loss.*; choose one of these",
    ):
        trained("other")


def test_a_metric_that_none_of_them_has_is_refused_before_the_first_step(tmp_path: Path) -> None:
    evaluation = {name: each for name, each in evaluations().items() if name != "last"}
    counts = Counts()
    with pytest.raises(
        RecipeError,
        match=(
            r"EarlyStopping watches 'loss', which is not measured; measured are valid/loss,"
            r" test/loss"
        ),
    ):
        ls.train(
            recipe(steps=STEPS, evaluation=evaluation),
            run_dir=str(tmp_path / "run"),
            hooks=[ls.EarlyStopping("loss"), counts],
        )
    assert counts.steps == 0


def test_early_stopping_counts_only_the_evaluations_of_its_metric(tmp_path: Path) -> None:
    evaluation = {name: each for name, each in evaluations().items() if name != "last"}
    stopping = ls.EarlyStopping("test/loss", patience=1, min_delta=1e9)
    result = ls.train(
        recipe(steps=20, evaluation=evaluation), run_dir=str(tmp_path / "run"), hooks=[stopping]
    )
    assert result.steps == 6, "measured after 3 and 6 steps, and not better after 6"


class Evaluates(ls.Hook):
    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def after_step(self, run: Any) -> None:
        if run.step == 5:
            self.found = [run.evaluate(), run.evaluate()]


def hook_evaluates(run_dir: str) -> tuple[list[dict[str, float]], str]:
    hook, run_recipe = (
        Evaluates(),
        recipe(steps=STEPS, evaluation=ls.Evaluation(data=rows(13, seed=1))),
    )
    fingerprint = ls.train(
        run_recipe, run_dir=run_dir, hooks=[hook], plan="numerics=bitwise"
    ).fingerprint
    return hook.found, fingerprint


def test_a_hook_evaluates_when_it_wants_and_what_is_learned_stays(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (alone,) = pool.run(1, hook_evaluates, str(tmp_path / "alone"))
    for found, fingerprint in pool.run(2, hook_evaluates, str(tmp_path / "run")):
        assert found == alone[0]
        assert found[0] == found[1]
        assert list(found[0]) == ["loss"]
        assert fingerprint == alone[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"evaluation": {"a/b": ls.Evaluation(data=rows(3))}},
            r"evaluation has the name 'a/b'.* choose another",
        ),
        ({"evaluation": {"loss": ls.Evaluation(data=rows(3))}}, r"evaluation has the name 'loss'"),
        (
            {"evaluation": {"valid": rows(3)}},
            r"evaluation\['valid'\] is .* give an ls.Evaluation under each name",
        ),
        ({"evaluation": rows(3)}, r"several by name \{'valid': ls.Evaluation\(...\)\}, or None"),
    ],
)
def test_a_wrong_evaluation_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(**changes)


def test_an_average_that_no_hook_keeps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError,
        match=r"evaluation\['last'\] has weights='average', but no hook keeps an average",
    ):
        ls.train(recipe(evaluation=evaluations()), run_dir=str(tmp_path / "run"))


def test_an_evaluation_without_one_in_the_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError,
        match=r"without Recipe.evaluation; it measures the recipe's evaluations; give ls.Evaluation",
    ):
        ls.evaluate(recipe())
    hook = Evaluates()
    with pytest.raises(RecipeError, match=r"run.evaluate\(\) without Recipe.evaluation"):
        ls.train(recipe(steps=STEPS), run_dir=str(tmp_path / "run"), hooks=[hook])
