"""Check before the first step that a followed metric will be measured."""

from __future__ import annotations

from lockstep.base.errors import RecipeError
from lockstep.training.hook import Hook
from lockstep.training.run import Run


def check_metric(run: Run, name: str, of: str) -> None:
    """Raise `RecipeError` if no evaluation measures the metric and no user hook may add it. `of`:
    who follows it."""
    evaluations = {} if run.recipe is None else run.recipe.evaluations
    measured = [
        f"{prefix}{metric}"
        for prefix, each in evaluations.items()
        for metric in ("loss", *each.metrics)
    ]
    terms = tuple(f"{prefix}loss/" for prefix in evaluations)
    if (
        not measured
        or name in measured
        or name.startswith(terms)
        or any(map(_may_add, run.hooks.all))
    ):
        return
    raise RecipeError(
        f"{of}, which is not measured; measured are {', '.join(measured)}; choose one of these"
    )


def _may_add(hook: Hook) -> bool:
    return type(hook).after_evaluation is not Hook.after_evaluation and not type(
        hook
    ).__module__.startswith("lockstep.")
