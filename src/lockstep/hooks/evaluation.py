"""The hook that evaluates the model during training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from lockstep.base.errors import RecipeError
from lockstep.hooks.metrics import Metrics, check_metric
from lockstep.hooks.moving_average import ExponentialMovingAverage
from lockstep.recipe.recipe import Evaluation, Recipe
from lockstep.training.evaluate import Evaluator
from lockstep.training.hook import ControlHook
from lockstep.training.loop import compare_data
from lockstep.training.run import Run


@dataclass(eq=False)
class EvaluationHook(ControlHook):
    """Measures each evaluation when it is due. `evaluations`: prefix of the metrics ->
    evaluation."""

    evaluations: Mapping[str, Evaluation]
    metrics: Metrics
    _evaluators: dict[str, Evaluator] = field(default_factory=dict)
    _average: ExponentialMovingAverage | None = None
    _is_measuring: bool = False

    def prepare(self, run: Run, recipe: Recipe) -> None:
        """Build the evaluators of the first model. Raises `RecipeError` without the average to
        evaluate."""
        self._average = next(
            (hook for hook in run.training.hooks.all if isinstance(hook, ExponentialMovingAverage)),
            None,
        )
        for prefix, evaluation in self.evaluations.items():
            if evaluation.weights == "average" and self._average is None:
                raise RecipeError(
                    f"{_name(prefix)} has weights='average', and no hook keeps an average; an"
                    " ls.ExponentialMovingAverage does; give"
                    " hooks=[ls.ExponentialMovingAverage(decay=0.999)]"
                )
            self._evaluators[prefix] = Evaluator.of(
                recipe, evaluation, run.context, run.training.modules[0]
            )
        run.training.measure = lambda: self.measure(run)

    def on_start(self, run: Run) -> None:
        for module in run.training.modules:
            if module.schedule.metric is not None:
                check_metric(
                    run, module.schedule.metric, f"the schedule follows {module.schedule.metric!r}"
                )
        for prefix, evaluator in self._evaluators.items():
            compare_data(run.training, f"{_name(prefix)}.data", evaluator.loader.digests())

    def before_steps(self, run: Run) -> None:
        for prefix, evaluation in self.evaluations.items():
            if evaluation.every == "epoch" and run.epoch is None:
                raise RecipeError(
                    f"{_name(prefix)} has every='epoch', and the training data has no length, so it"
                    " has no epochs; give a number of steps"
                )

    def after_step(self, run: Run) -> None:
        due = [prefix for prefix, each in self.evaluations.items() if _is_due(each, run)]
        if due:
            self.measure(run, due)
            run.training.agree_to_stop()

    def measure(self, run: Run, prefixes: Iterable[str] | None = None) -> None:
        """Measure the evaluations that were not measured after this step. Every rank calls it.
        None: all."""
        chosen = self.evaluations if prefixes is None else prefixes
        due = [prefix for prefix in chosen if run.metrics_at.get(f"{prefix}loss") != run.step]
        if not self._evaluators or not due or self._is_measuring:
            return
        self._is_measuring = True
        run.training.hooks.call("before_evaluation", run)
        before = run.context.phases.enter("evaluation")
        started = time.perf_counter()
        found = {
            f"{prefix}{name}": value
            for prefix in due
            for name, value in self._measured(run, prefix).items()
        }
        run.training.note_metrics(found)
        run.context.recorder.evaluation(run.step, found)
        self.metrics.throughput.exclude(time.perf_counter() - started)
        run.context.phases.enter("hooks")
        run.training.hooks.call("after_evaluation", run, found)
        run.training.note_metrics(found)  # with those that hooks have added
        for module in run.training.modules:
            metric = module.schedule.metric
            if metric in found:
                module.schedule.after_evaluation(found[metric])
            elif metric is not None:
                run.training.metric(metric, f"the schedule follows {metric!r}")
        run.context.phases.enter(before)
        self._is_measuring = False

    def _measured(self, run: Run, prefix: str) -> dict[str, float]:
        average = self._average if self.evaluations[prefix].weights == "average" else None
        with (
            run.training.modules[0].modes.evaluating(),
            nullcontext() if average is None else average.applied(run),
        ):
            return self._evaluators[prefix].measure(run.step, run.training.speeds)

    def on_end(self, run: Run) -> None:
        for evaluator in self._evaluators.values():
            evaluator.loader.close()


def _is_due(evaluation: Evaluation, run: Run) -> bool:
    if evaluation.every == "epoch":
        return run.has_ended_epoch
    return evaluation.every is not None and run.step % evaluation.every == 0


def _name(prefix: str) -> str:
    return f"evaluation[{prefix.removesuffix('/')!r}]" if prefix else "evaluation"
