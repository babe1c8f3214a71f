"""The hooks that write metrics.jsonl and run evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from lockstep.base.errors import LossError, RecipeError
from lockstep.hooks.moving_average import ExponentialMovingAverage
from lockstep.logging.recorder import Throughput
from lockstep.recipe.recipe import Evaluation, Recipe
from lockstep.training.balance import BALANCE_TERMS
from lockstep.training.consensus import Request
from lockstep.training.evaluate import Evaluator
from lockstep.training.hook import ControlHook, Hook
from lockstep.training.loop import compare_data
from lockstep.training.loss import SINGLE
from lockstep.training.run import Run
from lockstep.training.step_result import StepResult
from lockstep.training.train_module import TrainModule

# consecutive overflows; fewer are normal while fp16 searches for its loss scale, and are only
# recorded as events
_OVERFLOWS_TO_REPORT = 8


class Metrics(ControlHook):
    """Reads the losses and gradient norms at logging steps. Some reads are collectives, so every
    rank has this hook."""

    def __init__(self) -> None:
        self.throughput = Throughput()
        self._unread: list[StepResult] = []
        self._reported: list[TrainModule] = []

    def before_steps(self, run: Run) -> None:
        self.throughput = Throughput()

    def between_steps(self, run: Run) -> None:
        weights = run.training.current.weights
        if weights:
            weights = {name: each for name, each in weights.items() if name not in BALANCE_TERMS}
        self.throughput.count(run.training.current.samples, weights)
        self._unread += [
            result for result in run.training.results.values() if not result.is_settled
        ]
        if run.is_logging_step or run.training.stopping is not None:
            self._read(run)
        if run.is_logging_step:
            self._write(run)

    def on_agreement(self, run: Run, agreed: Request) -> None:
        if agreed.end is not None:
            self._read(run)

    def after_steps(self, run: Run) -> None:
        for module in run.training.modules:
            if module.overflows and module.overflows == run.step:
                raise LossError(
                    f"the model was updated in none of the {run.step} steps: the fp16 gradient"
                    f" overflowed in each, at last at a loss scale of {module.overflowed_at:g};"
                    " each such step halves the scale; take more steps, or precision='bf16' or"
                    " 'fp32'"
                )

    def _read(self, run: Run) -> None:
        results, self._unread = self._unread, []
        for result in results:
            result.check()
            if result.is_without_weight:
                run.event("term-without-weight", result.layout.step, term=SINGLE)
            if not result.was_applied:
                run.event(
                    "step-skipped",
                    result.layout.step,
                    reason="the scaled gradient overflowed; the loss scale was halved",
                )
        for module in run.training.modules:
            if module.overflows >= _OVERFLOWS_TO_REPORT and module not in self._reported:
                self._reported.append(module)
                run.context.recorder.message(
                    f"warning: {module.overflows} steps in a row were skipped, because the fp16"
                    f" gradient overflowed even at a loss scale of {module.overflowed_at:g}; if it"
                    " falls below 1, the run ends"
                )

    def _write(self, run: Run) -> None:
        """Write the metrics since the last logging step. Every rank must call this method."""
        result, speed = run.training.latest, self.throughput.restart()
        module = run.training.modules[0]
        # each rank of the axis `context` counts only its share of a sample's FLOPs
        devices = run.context.world.size // run.context.mesh.tokens.size
        values = {
            "loss": run.loss,
            **module.schedule.rates(),
            "gradient_norm": math.nan if result is None else float(result.norm),
            **speed,
            **run.training.measured,
        }
        if (mfu := module.flops.utilisation(speed["samples_per_second"], devices)) is not None:
            values["mfu"] = mfu
        terms = {} if result is None else result.term_losses()
        extra = {f"loss/{name}": value for name, value in terms.items()} | run.training.logged
        run.context.recorder.step(
            run.training.current.step + 1, values, extra, checksum=run.training.checksum
        )


def check_metric(run: Run, name: str, of: str) -> None:
    evaluations = {} if run.recipe is None else run.recipe.evaluations
    measured = [
        f"{prefix}{metric}"
        for prefix, each in evaluations.items()
        for metric in ("loss", *each.metrics)
    ]
    is_measured = name in measured or name.startswith(tuple(f"{each}loss/" for each in evaluations))
    if measured and not is_measured and not any(map(_may_add, run.training.hooks.all)):
        raise RecipeError(
            f"{of}, which is not measured; measured are {', '.join(measured)}; choose one of these"
        )


def _may_add(hook: Hook) -> bool:
    return type(hook).after_evaluation is not Hook.after_evaluation and not type(
        hook
    ).__module__.startswith("lockstep.")


@dataclass(eq=False)
class EvaluationHook(ControlHook):
    """Runs evaluations. `evaluations` maps the prefix of the metrics' names to the evaluation."""

    evaluations: Mapping[str, Evaluation]
    metrics: Metrics
    _evaluators: dict[str, Evaluator] = field(default_factory=dict)
    _average: ExponentialMovingAverage | None = None
    _is_measuring: bool = False

    def prepare(self, run: Run, recipe: Recipe) -> None:
        self._average = next(
            (hook for hook in run.training.hooks.all if isinstance(hook, ExponentialMovingAverage)),
            None,
        )
        for prefix, evaluation in self.evaluations.items():
            if evaluation.weights == "average" and self._average is None:
                raise RecipeError(
                    f"{_name(prefix)} has weights='average', but no hook keeps an average; give"
                    " hooks=[ls.ExponentialMovingAverage(decay=0.999)]"
                )
            self._evaluators[prefix] = Evaluator(
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
        """Run the evaluations that have not yet run after this step. Every rank must call this
        method."""
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
        run.training.note_metrics(found)  # includes metrics that hooks have added
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
