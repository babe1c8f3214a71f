"""The loop of steps: what happens before and after each one, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lockstep.base.errors import LossError
from lockstep.model.sync_batchnorm import Exchange
from lockstep.train.hook import Run
from lockstep.train.microbatches import Microbatches
from lockstep.train.step import Step
from lockstep.train.step_result import no_weight


def steps(
    run: Run, sources: Iterator[Microbatches], *, total: int, weight: Callable[[Any], Any] | None, exchange: Exchange
) -> Iterator[Step]:
    """Give each step to the script, which computes and commits it; then call the hooks and do what the ranks agree on.

    `sources`: each step's microbatches. `total`: the number of steps. `weight`: as in `Recipe`.
    """
    context, terms = run.context, None
    for source in context.phases.during("data", sources):
        context.phases.step = source.step
        if weight is not None:
            terms = _weigh(source, weight, terms)
        if len(run.modules) > 1:
            source.keep()
        run.is_logging_step = (source.step + 1) % context.log_every == 0 or source.step + 1 == total
        run.begin_step(source)
        step = Step(source, run, exchange)
        context.phases.enter("compute")
        yield step
        _check_committed(step, run)
        context.phases.enter("hooks")
        run.hooks.call("after_step", run)
        context.phases.enter("between steps")
        run.end_step(source)
        run.hooks.call("between_steps", run)
        run.agree()
        if run.stopping is not None:
            run.event("stopped", reason=run.stopping)
            return


def _weigh(source: Microbatches, weight: Callable[[Any], Any], terms: list[str] | None) -> list[str]:
    """Sum the weights of the step over all ranks. Returns the names of the loss's terms. Raises `LossError` if a sum is 0."""
    terms = source.weigh(weight, terms)
    for name, total in (source.weights or {}).items():
        if not total:
            raise LossError(no_weight(source.step, name))
    return terms


def _check_committed(step: Step, run: Run) -> None:
    if len(step.committed) < len(run.modules):
        raise LossError(
            f"step {step.index} ended with {len(step.committed)} of {len(run.modules)} prepared models committed; call "
            "step.commit(optimizer) for each on every rank, in every step"
        )
