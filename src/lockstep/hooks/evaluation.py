"""The hook that evaluates the model during training."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lockstep.hooks.metrics import Metrics
from lockstep.recipe.recipe import Evaluation, Recipe
from lockstep.training.evaluate import Evaluator
from lockstep.training.hook import ControlHook, Run
from lockstep.training.loop import compare_data


@dataclass(eq=False)
class EvaluationHook(ControlHook):
    settings: Evaluation
    metrics: Metrics
    _evaluator: Evaluator | None = None

    def prepare(self, run: Run, recipe: Recipe) -> None:
        """Build the evaluator of the run's first model."""
        self._evaluator = Evaluator.of(recipe, self.settings, run.context, run.modules[0])

    def on_start(self, run: Run) -> None:
        if self._evaluator is not None:
            compare_data(run, "evaluation.data", self._evaluator.loader.digests())

    def after_step(self, run: Run) -> None:
        if self.settings.every is not None and run.step % self.settings.every == 0:
            self.measure(run)
            run.agree_to_stop()

    def measure(self, run: Run) -> None:
        """Evaluate now, if not yet done after this step. Every rank calls it."""
        if self._evaluator is None or run.evaluated_at == run.step:
            return
        run.hooks.call("before_evaluation", run)
        before = run.context.phases.enter("evaluation")
        started = time.perf_counter()
        run.metrics = self._evaluator.measure(run.step)
        run.evaluated_at = run.step
        run.context.recorder.evaluation(run.step, run.metrics)
        self.metrics.throughput.exclude(time.perf_counter() - started)
        run.context.phases.enter("hooks")
        run.hooks.call("after_evaluation", run, run.metrics)
        run.context.phases.enter(before)

    def on_end(self, run: Run) -> None:
        if self._evaluator is not None:
            self._evaluator.loader.close()
