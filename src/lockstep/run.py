"""`train`: a recipe executed under a plan. It is written on `Session`, and adds the evaluation and
the run's result."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

from lockstep.base.errors import LockstepError, PlanError, RecipeError, UserError
from lockstep.base.events import Event
from lockstep.base.field_docs import with_field_docs
from lockstep.checkpoint.configuration import CONFIGURATION, save_configuration
from lockstep.comm.active_calls import active_calls
from lockstep.comm.recovery.regroup import abort_collectives
from lockstep.launch.recovery.rejoin import connect
from lockstep.launch.termination import Termination
from lockstep.logging.fingerprint import fingerprint
from lockstep.logging.loggers import Logger
from lockstep.logging.run_directory import check_tensors
from lockstep.opening import Opened
from lockstep.plan import MEASURED, Plan
from lockstep.recipe.code import code_and_objects_of, code_of
from lockstep.recipe.recipe import Recipe, Weights
from lockstep.saving import Best, Resume, Saving
from lockstep.scripts.request import EvaluateRequest, answered_by
from lockstep.session import Session
from lockstep.training.context import Context
from lockstep.training.hook import Hook
from lockstep.training.losses.loss_module import with_loss_in_model
from lockstep.training.recovery.recovery import Recovery
from lockstep.training.set_up import check_microbatch_is_fixed


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a run: the same on every rank, apart from `rank`. Rank 0 writes it to
    `result.json`."""

    steps: int
    """Optimizer steps done."""
    loss: float
    """The training loss of the last step: Σ total / Σ weight over its global batch. NaN after
    `lockstep evaluate`."""
    metrics: dict[str, float]
    """The last evaluation: `loss` and the recipe's metrics. Empty without one."""
    best: Best | None
    """The best evaluation by `Saving.best`, and its checkpoint. None without `Saving.best`, or if
    none was measured."""
    fingerprint: str
    """SHA-256 of the final parameters and buffers, see `lockstep.fingerprint`."""
    run_dir: str
    """The run directory."""
    plan: str
    """The plan, with every `auto` resolved."""
    rank: int
    """0 for the process that writes, and prints."""
    world_size: int
    """Number of processes."""
    seconds: float
    """Wall-clock time of training, evaluations included, set-up not."""
    samples_per_second: float
    """Training samples over those seconds."""
    events: list[Event]
    """Everything in `events.jsonl`, as this rank saw it."""


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
    """Train, on as many processes as were started. Every rank calls it, with the same recipe.

    - `plan`, `run_dir`: used if the launcher gives none. None: `replicate=auto`, and a new
      directory below `runs`.
    - `hooks`: called in this order; one with `state_dict` and `load_state_dict` is saved with the
      run.
    - `log_every`: steps between two lines of `metrics.jsonl`.
    - `saving`: when the run is saved, and what it keeps; None: `Saving()`.
    - `resume`: "auto" goes on with an unfinished run in `run_dir`, "never" refuses to, "must"
      refuses if there is none; the launcher's goes first.
    - `allow_change`: fields of the recipe that may then differ from what they were.
    - `loggers`: where else the run's numbers go, such as `ls.WandB(project=...)`; see
      `logging.loggers.Logger`.

    Raises the children of `ls.errors.UserError`, and `Preempted`, which ends the process with
    status 75, if it was asked to save and end.
    """
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"train({recipe!r}); it takes an ls.Recipe: build one with ls.Recipe(model=...,"
            " data=..., loss=..., ...)"
        )
    if (evaluated := EvaluateRequest.read(os.environ)) is not None:
        return _evaluate(recipe, evaluated.weights, plan=plan, run_dir=run_dir)
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
    resolved = [recipe]
    rejoin = connect(abort_collectives, lambda: active_calls() or None)
    if rejoin is not None:
        return _train_with_recovery(recipe, Recovery(rejoin), given)
    session = RecipeSession(resolved, **given)
    with session:
        return train_in(session, resolved[0])


def _train_with_recovery(recipe: Recipe, recovery: Recovery, given: dict[str, Any]) -> Result:
    """Train; after the loss of another process, open the run again in this one, with the rank that
    the launcher gives it."""
    while True:
        recovery.begin()
        try:
            result = _opened_and_trained(recipe, recovery, given)
        except BaseException as error:
            if not recovery.rejoined(error, None):
                recovery.close(failed=True)
                if (
                    recovery.is_under_way
                    and isinstance(error, UserError)
                    and not isinstance(error, PlanError)
                ):
                    # Before the loss there was no such mistake: processes that start anew may not
                    # make it.
                    recovery.refuse(error)
                    raise LockstepError(
                        f"the run cannot be opened again in this process: {error}"
                    ) from error
                raise
            lost = error
        else:
            recovery.close(failed=False)
            return result
        recovery.leave(lost)


def _opened_and_trained(recipe: Recipe, recovery: Recovery, given: dict[str, Any]) -> Result:
    resolved = [recipe]
    with RecipeSession(resolved, recovery, **given) as session:
        return train_in(session, resolved[0])


def evaluate(
    recipe: Recipe,
    weights: Weights | str | os.PathLike[str] | None = None,
    *,
    plan: str | Plan | None = None,
    run_dir: str | None = None,
) -> dict[str, float]:
    """Measure the recipe's evaluations without training, on as many processes as were started, and
    return the metrics by name. Every rank calls it, with the same arguments.

    `weights`: as in `Recipe`, such as a run's `model.safetensors`; None: those that the recipe
    begins with. `plan` and `run_dir`: as for `train`; the metrics are in `result.json` too. Raises
    the children of `ls.errors.UserError`.
    """
    return _evaluate(recipe, weights, plan=plan, run_dir=run_dir).metrics


def _evaluate(
    recipe: Recipe,
    weights: Weights | str | os.PathLike[str] | None,
    *,
    plan: str | Plan | None,
    run_dir: str | None,
) -> Result:
    if not recipe.evaluations:
        raise RecipeError(
            "an evaluation of a recipe without Recipe.evaluation; it measures those of the recipe;"
            " give ls.Evaluation(data=...)"
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
    resolved = [recipe]
    with RecipeSession(
        resolved, trains=False, run_dir=run_dir, plan=plan, resume="never"
    ) as session:
        _prepare(resolved[0], session)
        assert session.house.evaluation is not None, "the recipe has one"
        began = time.perf_counter()
        session.house.evaluation.on_start(session.run)
        session.house.evaluation.measure(session.run)
        return _result(session, time.perf_counter() - began, is_trained=False)


class RecipeSession(Session):
    """The session of a recipe. Its `auto` settings are measured on entering, and then in
    `recipes[0]`."""

    def __init__(
        self,
        recipes: list[Recipe],
        recovery: Recovery | None = None,
        *,
        trains: bool = True,
        **options: Any,
    ) -> None:
        (recipe,) = recipes
        self._evaluations, self._resolve, self._recovery = (
            recipe.evaluations,
            partial(_resolve, recipes),
            recovery,
        )
        self.code, self._code_and_objects = code_of(recipe), code_and_objects_of(recipe)
        super().__init__(
            seed=recipe.seed,
            precision="fp32" if recipe.precision == "auto" else recipe.precision,
            gradient_compression=recipe.gradient_compression,
            recipe=recipe.describe(),
            **options,
        )
        self._termination = Termination(saves=trains)


def train_in(session: Session, recipe: Recipe) -> Result:
    """Train in a session that has been entered. `recipe`: the session's, with every `auto`
    resolved."""
    run, evaluation = session.run, session.house.evaluation
    recipe = _prepare(recipe, session)
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
        weight=recipe.weight,
    ):
        step.compute(recipe.inputs, session.house.loss_check.watched(run, recipe))
        step.commit(clip_norm=recipe.clip_norm)
    if evaluation is not None:
        evaluation.measure(run)
    seconds = session.house.metrics.throughput.seconds()
    session.finish()
    return _result(session, seconds, is_trained=True)


def _resolve(recipes: list[Recipe], opened: Opened) -> Context:
    """Measure every setting that is `auto`. Puts the recipe with their values into `recipes[0]`,
    and returns the context with them."""
    (recipe,), plan = recipes, opened.context.plan
    if recipe.microbatch != "auto" and recipe.global_batch is not None:
        check_microbatch_is_fixed(plan, recipe.global_batch, recipe.microbatch)
    if plan.pipeline != 1 and recipe.inputs is None:
        raise RecipeError(
            f"pipeline={plan.pipeline} on a recipe in shorthand form (no inputs; the loss calls the"
            " model); it must call the model's parts itself, on several ranks; give"
            " Recipe(inputs=lambda batch: ..., loss=lambda output, batch: ...)"
        )
    if "auto" not in (
        recipe.precision,
        recipe.microbatch,
        *(getattr(plan, name) for name in MEASURED),
    ):
        return opened.context
    if recipe.global_batch is None:
        raise RecipeError(
            "auto with batch_sampler; what is auto is timed with microbatches of one size; give a"
            " value in recipe and plan"
        )
    if recipe.batch_loss is not None:
        raise RecipeError(
            "auto with batch_loss; what is auto is timed with a loss of one microbatch; give a"
            " value in the recipe and the plan"
        )
    from lockstep.autotune.autotune import autotune  # 5 ms to import

    recipes[0], context = autotune(recipe, opened)
    return context


def _prepare(given: Recipe, session: Session) -> Recipe:
    """Build the model, and register what is saved with the run. Returns the recipe with a loss
    module in the model."""
    recipe = with_loss_in_model(given)
    if recipe is not given and session.plan.pipeline != 1:
        raise RecipeError(
            f"pipeline={session.plan.pipeline} with a loss that is a module with parameters; stages"
            " hold all parameters; choose another plan, or make the parameters a part of the last"
            " stage"
        )
    run = session.run
    run.recipe, run.code = recipe, session.code
    session.prepare(
        recipe.model,
        recipe.optimizer,
        schedule=recipe.schedule,
        blocks=recipe.blocks,
        tensor=recipe.tensor,
        stages=recipe.stages,
        weights=recipe.weights,
    )
    metric = run.modules[0].schedule.metric
    if metric is not None and all(each.every is None for each in recipe.evaluations.values()):
        raise RecipeError(
            f"a ReduceLROnPlateau follows the evaluations' {metric!r}, and Recipe.evaluation has"
            " none, or every=None; give ls.Evaluation(every=...), or another schedule"
        )
    pipeline, check = (
        run.modules[0].parallel.pipeline,
        partial(check_tensors, run.model.state_dict()),
    )
    if pipeline is None:
        check()
    else:
        pipeline.raise_on_all_ranks(check)
    if session.house.evaluation is not None:
        session.house.evaluation.prepare(run, recipe)
    if run.rank == 0:
        save_configuration(run.model, run.dir / CONFIGURATION)
    return recipe


def _result(session: Session, seconds: float, *, is_trained: bool) -> Result:
    run, recorder = session.run, session.context.recorder
    state = run.modules[0].model_state()
    if is_trained:
        recorder.save_tensors("model.safetensors", state)
        run.hooks.call("on_save", run)
    run.end()
    result = Result(
        steps=run.step,
        loss=run.loss if is_trained else math.nan,
        metrics=run.metrics,
        best=session.house.checkpointing.best() if is_trained else None,
        fingerprint=fingerprint(state),
        run_dir=str(recorder.path),
        plan=str(session.plan),
        rank=session.rank,
        world_size=session.world_size,
        seconds=seconds,
        samples_per_second=session.house.metrics.throughput.total_samples / seconds,
        events=list(recorder.events.events),
    )
    recorder.end(
        {name: value for name, value in asdict(result).items() if name not in ("rank", "events")}
    )
    return result
