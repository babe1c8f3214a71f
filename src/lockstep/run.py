"""`train`: executes a recipe under a plan, in a `RecipeSession`."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

from lockstep.base.errors import RecipeError
from lockstep.comm.active_calls import active_calls
from lockstep.comm.regroup import abort_collectives
from lockstep.evaluation import EvaluateRequest, evaluated
from lockstep.launch.recovery.rejoin import connect
from lockstep.logging.loggers import Logger
from lockstep.plan import Plan
from lockstep.recipe.recipe import Recipe
from lockstep.recipe_session import RecipeSession, Result
from lockstep.saving import Resume, Saving
from lockstep.scripts.request import answered_by
from lockstep.training.hook import Hook
from lockstep.training.recovery import Recovery


def train(
    recipe: Recipe,
    *,
    plan: str | Plan | None = None,
    run_dir: str | None = None,
    hooks: Sequence[Hook] = (),
    log_every: int = 10,
    saving: Saving | None = None,
    resume: Resume = "auto",
    allow_change: Collection[str] = (),
    loggers: Sequence[Logger] = (),
) -> Result:
    """Train on the processes that were started. Every rank must call this function, with the same
    recipe.

    - `plan`, `run_dir`: used unless the launcher gives them. The defaults are `replicate=auto` and
      a new directory below `runs`.
    - `hooks`: called in the order of the list. A hook with `state_dict` and `load_state_dict` is
      saved with the run.
    - `log_every`: steps between two lines of `metrics.jsonl`.
    - `saving`: when the run is saved, and which checkpoints it keeps. The default is `Saving()`.
    - `resume`: "auto" continues an unfinished run in `run_dir`. "never" refuses to continue it.
      "must" refuses to start a new run. `--resume` of the launcher replaces the argument.
    - `allow_change`: fields of the recipe that may differ from the saved recipe at a resume.
    - `loggers`: services that receive the run's metrics, such as `ls.WandB(project=...)`. A logger
      implements `logging.loggers.Logger`.

    Raises the children of `ls.errors.UserError`. Raises `Preempted` if the run was asked to save
    and end. After `Preempted`, the process ends with status 75.
    """
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"train({recipe!r}); it takes an ls.Recipe: build one with ls.Recipe(model=...,"
            " data=..., loss=..., ...)"
        )
    if (request := EvaluateRequest.read(os.environ)) is not None:
        return evaluated(recipe, request.weights, plan=plan, run_dir=run_dir)
    if (instead := answered_by(os.environ, "train")) is not None:
        import_module(instead).train(recipe)
    given: dict[str, Any] = {
        "run_dir": run_dir,
        "plan": plan,
        "log_every": log_every,
        "hooks": hooks,
        "saving": saving,
        "resume": resume,
    }
    given |= {"allow_change": allow_change, "loggers": loggers}
    rejoin = connect(abort_collectives, lambda: active_calls() or None)
    recovery = None if rejoin is None else Recovery(rejoin, recipe, [*hooks, *loggers])

    def attempt() -> Result:
        with RecipeSession(recipe, recovery, **given) as session:
            return train_in(session)

    return attempt() if recovery is None else recovery.run(attempt)


def train_in(session: RecipeSession) -> Result:
    """Train in a session that is already entered."""
    session.build()
    run, recipe, house = session.run, session.recipe, session.house
    assert recipe.microbatch != "auto", "_resolve has chosen one"
    for step in session.steps(
        recipe.data,
        global_batch=recipe.global_batch,
        microbatch=recipe.microbatch,
        steps=recipe.steps,
        epochs=recipe.epochs,
        drop_last=recipe.drop_last,
        sampler=recipe.sampler,
        batch_sampler=recipe.batch_sampler,
        collate=recipe.collate,
        weight=session.recipe.weight,
    ):
        step.compute(recipe.inputs, house.loss_check.watched(run, recipe))
        step.commit(clip_norm=recipe.clip_norm)
    if house.evaluation is not None:
        house.evaluation.measure(run)
    seconds = house.metrics.throughput.seconds()
    session.finish()
    return session.result(seconds, is_trained=True)
