"""`train`: a recipe executed under a plan. It is written on `Session`, and adds evaluation, hooks and the run's result."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.base.errors import CheckpointError, RecipeError
from lockstep.base.events import Event
from lockstep.hooks.user_hooks import Hook, check_hooks
from lockstep.logging.fingerprint import fingerprint
from lockstep.logging.loggers import Logger
from lockstep.logging.run_directory import check_tensors
from lockstep.plan import MEASURED, Plan
from lockstep.recipe import Recipe
from lockstep.saving import Resume, Saving
from lockstep.session import Session
from lockstep.train.evaluate import Evaluator
from lockstep.train.set_up import check_microbatch_is_fixed
from lockstep.train.state import Stateful
from lockstep.train.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a run came to: the same on every rank, apart from `rank`, and on rank 0 written to `result.json`."""

    steps: int
    """Optimizer steps done."""
    loss: float
    """The training loss of the last step: Σ total / Σ weight over its global batch."""
    metrics: dict[str, float]
    """The last evaluation: `loss` and the recipe's metrics. Empty without one."""
    fingerprint: str
    """SHA-256 of the final parameters and buffers, see `lockstep.fingerprint`."""
    run_dir: str
    plan: str
    """The plan as resolved."""
    rank: int
    """0 for the process that writes, and prints."""
    world_size: int
    seconds: float
    """Wall-clock time of training, evaluations included, set-up not."""
    samples_per_second: float
    """Training samples over those seconds."""
    events: list[Event]
    """Everything in `events.jsonl`, as this rank saw it."""


class Run:
    """What hooks see and may do."""

    def __init__(self, recipe: Recipe, session: Session, model: nn.Module, optimizers: list[Optimizer], hooks: Sequence[Hook]) -> None:
        self.recipe = recipe
        self.session = session
        self.model = model
        """The user's own module."""
        self.optimizers = optimizers
        self.hooks = hooks
        self.step = 0
        """Steps done."""
        self.metrics: dict[str, float] = {}
        """The last evaluation."""
        self.evaluated_at: int | None = None
        self.last: Step | None = None
        self.seconds = 0.0
        self._loss = math.nan

    @property
    def loss(self) -> float:
        """Of the last step."""
        return self._loss if self.last is None else self.last.committed[0].loss()

    def state_dict(self) -> dict[str, Any]:
        """What the run is, besides its models and hooks."""
        return {"step": self.step, "metrics": self.metrics, "evaluated_at": self.evaluated_at, "loss": self.loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.step, self.metrics, self.evaluated_at, self._loss = (state[name] for name in ("step", "metrics", "evaluated_at", "loss"))

    def stop(self, reason: str) -> None:
        """Ask for the end of training. From `on_evaluation` it takes effect at once, else at the next logging step, on all ranks alike."""
        self.session.stop(reason)

    def event(self, name: str, **details: Any) -> None:
        """Write down that something happened."""
        self.session.event(name, self.step, **details)

    def save(self, name: str, state_dict: Mapping[str, Any]) -> None:
        """Write tensors to a safetensors file in the run directory. Every rank calls it; rank 0 writes, also what only other ranks of a
        pipeline have."""
        self.session.recorder.save_tensors(name, self.session.mesh.union(state_dict))


def train(
    recipe: Recipe,
    *,
    plan: str | Plan | None = None,
    run_dir: str | None = None,
    hooks: Sequence[Hook] = (),
    log_every: int = 10,
    saving: Saving | None = None,
    resume: Resume = "auto",
    may_differ: Collection[str] = (),
    loggers: Sequence[Logger] = (),
) -> Result:
    """Train, on as many processes as were started. Every rank calls it, with the same recipe.

    `plan` and `run_dir`: where the launcher gives none. None: `replicate=auto`, and a new directory below `runs`. `log_every`: steps
    between the lines of `metrics.jsonl`. `saving`: when the run saves itself, and what it keeps; None: `Saving()`. `resume`: "auto" goes on
    with an unfinished run in `run_dir`, "never" refuses to, "must" refuses where there is none; the launcher's goes first. `may_differ`:
    fields of the recipe that may then be others than they were. A hook that has `state_dict` and `load_state_dict` is saved with the run.
    `loggers`: where else the run's numbers go, such as `ls.WandB(project=...)`; see `watch.loggers.Logger`.
    Raises the children of `lockstep.base.errors.UserError`, and `Preempted`, which ends the process with status 75, where it was asked to save
    and end.
    """
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"train({recipe!r}); it takes an ls.Recipe: build one with ls.Recipe(model=..., data=..., loss=..., ...)")
    check_hooks(hooks)
    session = Session(
        run_dir=run_dir,
        seed=recipe.seed,
        plan=plan,
        precision="fp32" if recipe.precision == "auto" else recipe.precision,
        comm=recipe.comm,
        log_every=log_every,
        recipe=recipe.describe(),
        saving=saving,
        resume=resume,
        may_differ=may_differ,
        loggers=loggers,
    )
    if saving is not None and saving.best is not None and (recipe.evaluation is None or recipe.evaluation.every is None):
        raise CheckpointError(
            f"Saving(best={saving.best!r}) without Recipe.evaluation, or with every=None; it is a metric of evaluations; give "
            "ls.Evaluation(every=...), at steps at which the run saves"
        )
    with session:
        if recipe.microbatch != "auto":
            check_microbatch_is_fixed(session.plan, recipe.global_batch, recipe.microbatch)
        if session.plan.pipeline != 1 and recipe.inputs is None:
            raise RecipeError(
                f"pipeline={session.plan.pipeline} on a recipe in shorthand form (no inputs; the loss calls the model); it must call the "
                "model's parts itself, on several ranks; give Recipe(inputs=lambda batch: ..., loss=lambda output, batch: ...)"
            )
        run = _prepare(recipe, session, hooks)
        recipe, evaluator = run.recipe, None
        if recipe.evaluation is not None:
            evaluator = Evaluator.of(recipe, recipe.evaluation, session.mesh, session.plan, session.pairs[0])
            session.on_exit(evaluator.loader.close)
        session.course.others["run"] = run
        for place, hook in enumerate(hooks):
            session.on_event(partial(hook.on_event, run))
            if isinstance(hook, Stateful):
                session.course.others[f"{place}-{type(hook).__qualname__}"] = hook
        for hook in hooks:
            hook.on_start(run)
        _train(run, evaluator)
        return _result(run)


def _prepare(recipe: Recipe, session: Session, hooks: Sequence[Hook]) -> Run:
    model, made = session.prepare(
        recipe.model,
        recipe.optimizer,
        schedule=recipe.schedule,
        blocks=recipe.blocks,
        tensor=recipe.tensor,
        stages=recipe.stages,
        weights=recipe.weights,
    )
    check = partial(check_tensors, model.state_dict())
    if (pipeline := session.pairs[0].pipeline) is None:
        check()
    else:
        pipeline.raise_on_all_ranks(check)
    if "auto" in (recipe.precision, recipe.microbatch, *(getattr(session.plan, name) for name in MEASURED)):
        from lockstep.autotune.autotune import settled  # 5 ms to import

        recipe = settled(recipe, session)
    return Run(recipe, session, model, made if isinstance(made, list) else [made], hooks)


def _train(run: Run, evaluator: Evaluator | None) -> None:
    recipe, session = run.recipe, run.session
    assert recipe.microbatch != "auto", "settled has chosen one"
    steps = session.steps(
        recipe.data,
        global_batch=recipe.global_batch,
        microbatch=recipe.microbatch,
        steps=recipe.steps,
        epochs=recipe.epochs,
        collate=recipe.collate,
        weight=recipe.weight,
    )
    every = recipe.evaluation.every if recipe.evaluation is not None else None
    for step in steps:
        step.compute(recipe.inputs, recipe.loss)
        step.commit(clip_norm=recipe.clip_norm)
        run.step, run.last = step.index + 1, step
        session.phases.enter("hooks")
        for hook in run.hooks:
            hook.on_step(run)
        if evaluator is not None and every is not None and run.step % every == 0:
            _evaluate(run, evaluator)
            session.take_stop()
    if evaluator is not None and run.evaluated_at != run.step:
        _evaluate(run, evaluator)
    run.seconds = session.reports.pace.seconds()
    for hook in run.hooks:
        hook.on_end(run)


def _evaluate(run: Run, evaluator: Evaluator) -> None:
    before = run.session.phases.enter("evaluation")
    started = time.perf_counter()
    run.metrics = evaluator.measure(run.model, run.step)
    run.evaluated_at = run.step
    run.session.evaluated = run.metrics
    run.session.recorder.evaluation(run.step, run.metrics)
    run.session.reports.pace.leave_out(time.perf_counter() - started)
    run.session.phases.enter("hooks")
    for hook in run.hooks:
        hook.on_evaluation(run, run.metrics)
    run.session.phases.enter(before)


def _result(run: Run) -> Result:
    session = run.session
    state = session.mesh.union(run.model.state_dict())
    session.recorder.save_tensors("model.safetensors", state)
    for hook in run.hooks:
        hook.on_save(run)
    session.event("run-ended", run.step)
    result = Result(
        steps=run.step,
        loss=run.loss,
        metrics=run.metrics,
        fingerprint=fingerprint(state),
        run_dir=str(session.recorder.path),
        plan=str(session.plan),
        rank=session.rank,
        world_size=session.world_size,
        seconds=run.seconds,
        samples_per_second=session.reports.pace.total_samples / run.seconds,
        events=list(session.recorder.events.events),
    )
    written = {name: value for name, value in asdict(result).items() if name not in ("rank", "events")}
    session.recorder.end(written)
    return result
