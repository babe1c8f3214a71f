"""Measures a recipe's evaluations without training."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from lockstep.base.errors import RecipeError
from lockstep.plan import Plan
from lockstep.recipe.recipe import Recipe, Weights
from lockstep.scripts.request import ScriptRequest

if TYPE_CHECKING:
    from lockstep.recipe_session import Result


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateRequest(ScriptRequest):
    """The request of `lockstep evaluate` to a script's processes. The processes evaluate `weights`
    (a file or a Hugging Face folder) instead of training."""

    answered_by: ClassVar[str] = __name__
    calls: str = "evaluate"
    weights: str


def evaluate(
    recipe: Recipe,
    weights: Weights | str | os.PathLike[str] | None = None,
    *,
    plan: str | Plan | None = None,
    run_dir: str | None = None,
) -> dict[str, float]:
    """Measure the recipe's evaluations without training, on the processes that were started.
    Returns the metrics by name. Every rank must call this function, with the same arguments.

    `weights` has the form of `Recipe.weights`, such as a run's `model.safetensors`. With
    `weights=None`, the weights are the initial weights of a training. `plan` and `run_dir` have the
    same meaning as in `train`. The metrics are also written to `result.json`. Raises the children
    of `ls.errors.UserError`.
    """
    return evaluated(recipe, weights, plan=plan, run_dir=run_dir).metrics


def evaluated(
    recipe: Recipe,
    weights: Weights | str | os.PathLike[str] | None,
    *,
    plan: str | Plan | None,
    run_dir: str | None,
) -> Result:
    if not recipe.evaluations:
        raise RecipeError(
            "an evaluation of a recipe without Recipe.evaluation; it measures the recipe's"
            " evaluations; give ls.Evaluation(data=...)"
        )
    measured = {
        name.removesuffix("/"): replace(each, weights="current")
        for name, each in recipe.evaluations.items()
    }
    recipe = replace(
        recipe,
        evaluation=measured.get("", measured),
        weights=recipe.weights if weights is None else weights,
    )
    # import late: this imports torch, which the command does not need
    from lockstep.recipe_session import RecipeSession

    with RecipeSession(recipe, trains=False, run_dir=run_dir, plan=plan, resume="never") as session:
        session.build()
        assert session.house.evaluation is not None, "the recipe has one"
        began = time.perf_counter()
        session.house.evaluation.on_start(session.run)
        session.house.evaluation.measure(session.run)
        return session.result(time.perf_counter() - began, is_trained=False)
