"""`train`: a recipe executed under a plan. It is written on `Session`, and adds the evaluation and the run's result."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from lockstep.base.errors import CheckpointError, RecipeError
from lockstep.base.events import Event
from lockstep.logging.fingerprint import fingerprint
from lockstep.logging.loggers import Logger
from lockstep.logging.run_directory import check_tensors
from lockstep.opening import Opened
from lockstep.plan import MEASURED, Plan
from lockstep.recipe.code import code_of
from lockstep.recipe.recipe import Recipe
from lockstep.saving import Best, Resume, Saving
from lockstep.session import Session
from lockstep.training.context import Context
from lockstep.training.hook import Hook
from lockstep.training.set_up import check_microbatch_is_fixed
from lockstep.training.state import Stateful


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a run: the same on every rank, apart from `rank`. Rank 0 writes it to `result.json`."""

    steps: int
    """Optimizer steps done."""
    loss: float
    """The training loss of the last step: Σ total / Σ weight over its global batch."""
    metrics: dict[str, float]
    """The last evaluation: `loss` and the recipe's metrics. Empty without one."""
    best: Best | None
    """The best evaluation by `Saving.best`, and its checkpoint. None without `Saving.best`, or if none was measured."""
    fingerprint: str
    """SHA-256 of the final parameters and buffers, see `lockstep.fingerprint`."""
    run_dir: str
    plan: str
    """The plan, with every `auto` resolved."""
    rank: int
    """0 for the process that writes, and prints."""
    world_size: int
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

    `plan` and `run_dir`: used if the launcher gives none. None: `replicate=auto`, and a new directory below `runs`.
    `hooks`: called in this order; one with `state_dict` and `load_state_dict` is saved with the run. `log_every`: steps
    between two lines of `metrics.jsonl`. `saving`: when the run is saved, and what it keeps; None: `Saving()`.
    `resume`: "auto" goes on with an unfinished run in `run_dir`, "never" refuses to, "must" refuses if there is none;
    the launcher's goes first. `allow_change`: fields of the recipe that may then differ from what they were. `loggers`:
    where else the run's numbers go, such as `ls.WandB(project=...)`; see `logging.loggers.Logger`. Raises the children
    of `lockstep.errors.UserError`, and `Preempted`, which ends the process with status 75, if it was asked to save and
    end.
    """
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"train({recipe!r}); it takes an ls.Recipe: build one with ls.Recipe(model=..., data=..., loss=..., ...)")
    resolved = [recipe]
    session = Session(
        run_dir=run_dir,
        seed=recipe.seed,
        plan=plan,
        precision="fp32" if recipe.precision == "auto" else recipe.precision,
        gradient_compression=recipe.gradient_compression,
        log_every=log_every,
        hooks=hooks,
        recipe=recipe.describe(),
        saving=saving,
        resume=resume,
        allow_change=allow_change,
        loggers=loggers,
        evaluation=recipe.evaluation,
        resolve=partial(_resolve, resolved),
    )
    if saving is not None and saving.best is not None and (recipe.evaluation is None or recipe.evaluation.every is None):
        raise CheckpointError(
            f"Saving(best={saving.best!r}) without Recipe.evaluation, or with every=None; it is a metric of evaluations; give "
            "ls.Evaluation(every=...)"
        )
    with session:
        return _train(resolved[0], session)


def _train(recipe: Recipe, session: Session) -> Result:
    run, evaluation = session.run, session.house.evaluation
    _prepare(recipe, session)
    assert recipe.microbatch != "auto", "_resolve has chosen one"
    for step in session.steps(
        recipe.data,
        global_batch=recipe.global_batch,
        microbatch=recipe.microbatch,
        steps=recipe.steps,
        epochs=recipe.epochs,
        drop_last=recipe.drop_last,
        collate=recipe.collate,
        weight=recipe.weight,
    ):
        step.compute(recipe.inputs, recipe.loss)
        step.commit(clip_norm=recipe.clip_norm)
    if evaluation is not None:
        evaluation.measure(run)
    seconds = session.house.metrics.throughput.seconds()
    session.finish()
    return _result(session, seconds)


def _resolve(recipes: list[Recipe], opened: Opened) -> Context:
    """Measure every setting that is `auto`. Puts the recipe with their values into `recipes[0]`, and returns the
    context with them."""
    (recipe,), plan = recipes, opened.context.plan
    if recipe.microbatch != "auto":
        check_microbatch_is_fixed(plan, recipe.global_batch, recipe.microbatch)
    if plan.pipeline != 1 and recipe.inputs is None:
        raise RecipeError(
            f"pipeline={plan.pipeline} on a recipe in shorthand form (no inputs; the loss calls the model); it must call the "
            "model's parts itself, on several ranks; give Recipe(inputs=lambda batch: ..., loss=lambda output, batch: ...)"
        )
    if "auto" not in (recipe.precision, recipe.microbatch, *(getattr(plan, name) for name in MEASURED)):
        return opened.context
    from lockstep.autotune.autotune import autotune  # 5 ms to import

    recipes[0], context = autotune(recipe, opened)
    return context


def _prepare(recipe: Recipe, session: Session) -> None:
    """Build the model, and register what is saved with the run."""
    run = session.run
    run.recipe, run.code = recipe, code_of(recipe)
    session.prepare(
        recipe.model,
        recipe.optimizer,
        schedule=recipe.schedule,
        blocks=recipe.blocks,
        tensor=recipe.tensor,
        stages=recipe.stages,
        weights=recipe.weights,
    )
    pipeline, check = run.modules[0].parallel.pipeline, partial(check_tensors, run.model.state_dict())
    if pipeline is None:
        check()
    else:
        pipeline.raise_on_all_ranks(check)
    if session.house.evaluation is not None:
        session.house.evaluation.prepare(run, recipe)
    run.include("run", run)
    for place, hook in enumerate(session.hooks):
        if isinstance(hook, Stateful):
            run.include(f"{place}-{type(hook).__qualname__}", hook)


def _result(session: Session, seconds: float) -> Result:
    run, recorder = session.run, session.context.recorder
    state = session.context.mesh.union(run.model.state_dict())
    recorder.save_tensors("model.safetensors", state)
    run.hooks.call("on_save", run)
    run.event("run-ended")
    result = Result(
        steps=run.step,
        loss=run.loss,
        metrics=run.metrics,
        best=session.house.checkpointing.best(),
        fingerprint=fingerprint(state),
        run_dir=str(recorder.path),
        plan=str(session.plan),
        rank=session.rank,
        world_size=session.world_size,
        seconds=seconds,
        samples_per_second=session.house.metrics.throughput.total_samples / seconds,
        events=list(recorder.events.events),
    )
    recorder.end({name: value for name, value in asdict(result).items() if name not in ("rank", "events")})
    return result
