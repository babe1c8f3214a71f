"""The hook that writes metrics.jsonl, and the check that a followed metric is measured."""

from __future__ import annotations

import math

from lockstep.base.errors import LossError, RecipeError
from lockstep.logging.recorder import Throughput
from lockstep.training.consensus import Request
from lockstep.training.hook import ControlHook, Hook
from lockstep.training.losses.loss import SINGLE
from lockstep.training.run import Run
from lockstep.training.step_result import StepResult
from lockstep.training.train_module import TrainModule

# in a row. Fewer are normal while fp16 searches its loss scale, and are only events.
_OVERFLOWS_TO_REPORT = 8


class Metrics(ControlHook):
    """Reads the results of steps at logging steps, and writes metrics.jsonl. Some reads are
    collectives, so every rank runs it."""

    def __init__(self) -> None:
        self.throughput = Throughput()
        self._unread: list[StepResult] = []
        self._reported: list[TrainModule] = []

    def before_steps(self, run: Run) -> None:
        self.throughput = Throughput()

    def between_steps(self, run: Run) -> None:
        assert run.training.source is not None, "a step has begun"
        self.throughput.count(run.training.source.samples, run.training.source.weights)
        self._unread += run.training.results.values()
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
                    f"none of the {run.step} steps was applied: the fp16 gradient overflowed in"
                    f" each, at last at a loss scale of {module.overflowed_at:g}; each such step"
                    " halves the scale; take more steps, or precision='bf16' or 'fp32'"
                )

    def _read(self, run: Run) -> None:
        """Check the results since the last call. Raises `LossError`."""
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
        """Write the latest step's line. Every rank calls it."""
        assert run.training.source is not None, "a step has begun"
        result, speed = run.training.latest, self.throughput.restart()
        module, world_size = run.training.modules[0], run.context.world.size
        norm = math.nan if result is None else float(result.norm)
        values = {
            "loss": run.loss,
            **module.schedule.rates(),
            "gradient_norm": norm,
            **speed,
            **run.training.measured,
        }
        if (mfu := module.flops.utilisation(speed["samples_per_second"], world_size)) is not None:
            values["mfu"] = mfu
        terms = (
            {}
            if result is None
            else {f"loss/{name}": value for name, value in result.term_losses().items()}
        )
        run.context.recorder.step(
            run.training.source.step + 1, values, {**terms, **run.training.logged}
        )


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
        or any(map(_may_add, run.training.hooks.all))
    ):
        return
    raise RecipeError(
        f"{of}, which is not measured; measured are {', '.join(measured)}; choose one of these"
    )


def _may_add(hook: Hook) -> bool:
    return type(hook).after_evaluation is not Hook.after_evaluation and not type(
        hook
    ).__module__.startswith("lockstep.")
