"""The session of a recipe, which measures `auto` settings, builds the model, and writes the
result."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from lockstep.base.errors import RecipeError
from lockstep.base.events import Event
from lockstep.base.field_docs import with_field_docs
from lockstep.checkpoint.saved_model import CONFIGURATION, save_configuration
from lockstep.launch.termination import Termination
from lockstep.logging.fingerprint import fingerprint
from lockstep.logging.run_directory import check_tensors
from lockstep.opening import Opened
from lockstep.plan import MEASURED, Plan
from lockstep.recipe.code import RecipeCode
from lockstep.recipe.recipe import Recipe
from lockstep.saving import Best
from lockstep.session import Session
from lockstep.training.context import Context
from lockstep.training.loss import with_loss_in_model
from lockstep.training.recovery import Recovery
from lockstep.training.set_up import check_microbatch_is_fixed


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a run. All fields except `rank` are equal on all ranks. Rank 0 writes the
    result to `result.json`."""

    steps: int
    """Optimizer steps done."""
    loss: float
    """The training loss of the last step: Σ total / Σ weight over its global batch. NaN after
    `lockstep evaluate`."""
    metrics: dict[str, float]
    """The metrics of the last evaluation: `loss` and the metrics of the recipe. Empty without an
    evaluation."""
    best: Best | None
    """The best evaluation by `Saving.best`, and its checkpoint. None if `Saving.best` is not set,
    or if no evaluation measured the metric."""
    fingerprint: str
    """SHA-256 of the final parameters and buffers. See `lockstep.fingerprint`."""
    run_dir: str
    """The run directory."""
    plan: str
    """The plan, with every `auto` resolved."""
    rank: int
    """The rank of this process. Rank 0 writes files and prints."""
    world_size: int
    """Number of processes."""
    seconds: float
    """Wall-clock seconds of training, with evaluations but without setup."""
    samples_per_second: float
    """Training samples divided by `seconds`."""
    events: list[Event]
    """All events of the run that this rank has seen, as in `events.jsonl`."""


def _check_shorthand(plan: Plan, recipe: Recipe) -> None:
    for applies, what, why in (
        (
            plan.pipeline != 1,
            f"pipeline={plan.pipeline}",
            "it must call the model's parts itself, on several ranks",
        ),
        (
            plan.context != 1,
            f"context={plan.context}",
            "it must call the model itself, with parts of the sequences",
        ),
        (
            recipe.sequence is not None,
            "sequence",
            "it must call the model itself, with documents and random numbers by chunk",
        ),
    ):
        if applies:
            raise RecipeError(
                f"{what} on a recipe in shorthand form (no inputs; the loss calls the model);"
                f" {why}; give Recipe(inputs=lambda batch: ..., loss=lambda output, batch: ...)"
            )


class RecipeSession(Session):
    """The session of a recipe. `__enter__` measures the `auto` settings and puts the values into
    `recipe`."""

    def __init__(
        self,
        recipe: Recipe,
        recovery: Recovery | None = None,
        *,
        trains: bool = True,
        **options: Any,
    ) -> None:
        self.recipe = recipe
        self._evaluations, self._recovery = recipe.evaluations, recovery
        # after a recovery, compare the recipe as the script gave it
        code = RecipeCode.of(recipe) if recovery is None else recovery.code
        self.code, self._code_and_objects = code
        super().__init__(
            seed=recipe.seed,
            precision="fp32" if recipe.precision == "auto" else recipe.precision,
            gradient_compression=recipe.gradient_compression,
            recipe=recipe.describe(),
            **options,
        )
        self._termination = Termination(saves=trains)

    def _resolve(self, opened: Opened) -> Context:
        recipe, plan = self.recipe, opened.context.plan
        if recipe.microbatch != "auto" and recipe.global_batch is not None:
            check_microbatch_is_fixed(plan, recipe.global_batch, recipe.microbatch)
        if recipe.inputs is None:
            _check_shorthand(plan, recipe)
        settings = {name: getattr(plan, name) for name in MEASURED}
        settings |= {"precision": recipe.precision, "microbatch": recipe.microbatch}
        automatic = [name for name, value in settings.items() if value == "auto"]
        if not automatic:
            return opened.context
        if plan.context != 1:
            raise RecipeError(
                f"{', '.join(automatic)} = auto with context={plan.context}; auto is chosen by"
                " training with whole sequences; give a value"
            )
        if recipe.global_batch is None:
            raise RecipeError(
                "auto with batch_sampler; what is auto is timed with microbatches of one size; give"
                " a value in recipe and plan"
            )
        if recipe.batch_loss is not None:
            raise RecipeError(
                "auto with batch_loss; what is auto is timed with a loss of one microbatch; give a"
                " value in the recipe and the plan"
            )
        from lockstep.autotune.autotune import autotune  # 5 ms to import

        self.recipe, context = autotune(recipe, opened)
        return context

    def build(self) -> None:
        """Build the model and its optimizer. Also registers the objects whose state is saved with
        the run."""
        recipe = with_loss_in_model(self.recipe)
        if recipe is not self.recipe and self.plan.pipeline != 1:
            raise RecipeError(
                f"pipeline={self.plan.pipeline} with a loss that is a module with parameters;"
                " stages hold all parameters; choose another plan, or make the parameters a part of"
                " the last stage"
            )
        run, self.recipe = self.run, recipe
        run.recipe, run.training.code = recipe, self.code
        self.prepare(
            recipe.model,
            recipe.optimizer,
            schedule=recipe.schedule,
            blocks=recipe.blocks,
            tensor=recipe.tensor,
            stages=recipe.stages,
            sequence=recipe.sequence,
            head=recipe.head,
            experts=recipe.experts,
            weights=recipe.weights,
            balance=recipe.balance,
        )
        metric = run.training.modules[0].schedule.metric
        if metric is not None and all(each.every is None for each in recipe.evaluations.values()):
            raise RecipeError(
                f"a ReduceLROnPlateau follows the evaluations' {metric!r}, and Recipe.evaluation"
                " has none, or every=None; give ls.Evaluation(every=...), or another schedule"
            )
        pipeline, check = (
            run.training.modules[0].parallel.pipeline,
            partial(check_tensors, run.model.state_dict()),
        )
        if pipeline is None:
            check()
        else:
            pipeline.raise_on_all_ranks(check)
        if self.house.evaluation is not None:
            self.house.evaluation.prepare(run, recipe)
        if run.rank == 0:
            save_configuration(run.model, run.dir / CONFIGURATION)

    def result(self, seconds: float, *, is_trained: bool) -> Result:
        """Write the result and the final weights. A run that was only evaluated has no final
        weights."""
        run, recorder = self.run, self.context.recorder
        state = run.training.modules[0].model_state()
        if is_trained:
            recorder.save_tensors("model.safetensors", state)
            run.training.hooks.call("on_save", run)
        run.training.end()
        result = Result(
            steps=run.step,
            loss=run.loss if is_trained else math.nan,
            metrics=run.metrics,
            best=self.house.checkpointing.best() if is_trained else None,
            fingerprint=fingerprint(state),
            run_dir=str(recorder.path),
            plan=str(self.plan),
            rank=self.rank,
            world_size=self.world_size,
            seconds=seconds,
            samples_per_second=self.house.metrics.throughput.total_samples / seconds,
            events=list(recorder.events.events),
        )
        recorder.end(
            {
                name: value
                for name, value in asdict(result).items()
                if name not in ("rank", "events")
            }
        )
        return result
