"""Learning-rate schedules: functions of the step, or torch's schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.base.errors import CheckpointError, RecipeError
from lockstep.base.field_docs import with_field_docs


@with_field_docs
@dataclass(frozen=True, slots=True)
class OnMetric:
    """A schedule for `Recipe.schedule` that follows an evaluation metric. `ls.OnMetric` steps a
    torch ReduceLROnPlateau after each evaluation that measures the metric."""

    metric: str
    """Name of the metric: `accuracy`, or `valid/accuracy` for an evaluation that has the name
    `valid`. A `ReduceLROnPlateau` without `ls.OnMetric` follows the metric `loss`."""
    scheduler: Callable[[Optimizer], LRScheduler]
    """Function of the optimizer that returns a `ReduceLROnPlateau`."""

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        return self.scheduler(optimizer)


class Schedule:
    """Sets the learning rates of each step: the optimizer's rates times a function of the step, or
    the rates of torch LRSchedulers."""

    def __init__(
        self, schedule: Callable[[Any], Any] | None, optimizers: Sequence[Optimizer]
    ) -> None:
        self._multiplier: Callable[[int], float] | None = None
        self._schedulers: list[LRScheduler] = []
        self._optimizers = optimizers
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._latest = self._rates()
        self._given = schedule is not None
        self.metric: str | None = None
        """The evaluation metric that the schedule follows. None if the schedule follows the step
        number."""
        self._set: list[float] | None = None
        """The learning rates that the schedule set last."""
        if schedule is None:
            return
        try:
            multiplier = schedule(0)
        except Exception as error:
            self._schedulers = [_scheduler(schedule, optimizer, error) for optimizer in optimizers]
            if any(isinstance(each, ReduceLROnPlateau) for each in self._schedulers):
                self.metric = schedule.metric if isinstance(schedule, OnMetric) else "loss"
            return
        if isinstance(multiplier, bool) or not isinstance(multiplier, int | float):
            raise RecipeError(
                f"schedule(0) returned {multiplier!r} (a {type(multiplier).__name__}); a schedule"
                " is step -> multiplier of the learning rate, a number; or optimizer -> torch"
                " LRScheduler"
            )
        if None in (rates := self._rates()):
            raise RecipeError(
                f"schedule with an optimizer whose group {rates.index(None)} has no learning rate;"
                " a schedule multiplies that rate; leave the schedule out, or give the optimizer lr"
            )
        self._multiplier = schedule
        self._base = [float(group["lr"]) for group in self._groups]

    @property
    def counts_updates(self) -> bool:
        return any(not isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._schedulers)

    def before_step(self, step: int) -> None:
        """Raises `RecipeError` if other code has changed the learning rates."""
        if self._set is not None and self._set != (rates := self._rates()):
            number = next(
                i for i, (now, then) in enumerate(zip(rates, self._set, strict=True)) if now != then
            )
            raise RecipeError(
                f"after step {step}: the learning rate of group {number} is"
                f" {_shown(rates[number])}, and the schedule had set it to"
                f" {_shown(self._set[number])}; the schedule sets it for every step, so the change"
                " would be lost; either leave the schedule out, and set the rates of"
                " run.optimizers in a hook, or leave the rates to the schedule"
            )
        if self._multiplier is not None:
            multiplier = self._multiplier(step)
            if not math.isfinite(multiplier):
                raise RecipeError(
                    f"schedule({step}) returned {multiplier}; a multiplier of the learning rate"
                    " must be finite; correct the schedule"
                )
            for group, base in zip(self._groups, self._base, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(base * multiplier)
                else:
                    group["lr"] = base * multiplier
        rates = self._rates()
        self._latest = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        self._note_rates()

    def after_step(self) -> None:
        for scheduler in self._schedulers:
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
        self._note_rates()

    def after_evaluation(self, value: float) -> None:
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(value)
        self._note_rates()

    def _note_rates(self) -> None:
        # reading a tensor may wait for a GPU
        if self._given and not any(isinstance(group["lr"], Tensor) for group in self._groups):
            self._set = self._rates()

    def _rates(self) -> list[Any]:
        return [group.get("lr") for group in self._groups]

    def state_dict(self) -> list[dict[str, Any]]:
        return [scheduler.state_dict() for scheduler in self._schedulers]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        if len(states) != len(self._schedulers):
            raise CheckpointError(
                f"the checkpoint has {len(states)} torch LRSchedulers and this run has"
                f" {len(self._schedulers)}; a schedule that is a function of the step needs none;"
                " resume with the schedule that it was saved with"
            )
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        self._set = None

    def change_base(self, optimizer: int, group: int, before: float, now: float) -> None:
        """Give a loaded torch scheduler the recipe's new learning rate."""
        if self._multiplier is not None:
            return
        settings = self._optimizers[optimizer].param_groups[group]
        rate = now * (float(settings["lr"]) / before if before else 1.0)
        if isinstance(settings["lr"], Tensor):
            settings["lr"].fill_(rate)
        else:
            settings["lr"] = rate
        if self._schedulers:
            settings["initial_lr"] = self._schedulers[optimizer].base_lrs[group] = now

    def rates(self) -> dict[str, float]:
        """Return the rates by their names in metrics.jsonl: `lr`, and `lr/1` and so on for param
        groups with a different rate."""
        rates = [None if rate is None else float(rate) for rate in self._latest]
        shown = enumerate(rates if len(set(rates)) > 1 else rates[:1])
        return {
            f"lr/{number}" if number else "lr": rate for number, rate in shown if rate is not None
        }


def _shown(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:g}"


def _scheduler(
    factory: Callable[[Any], Any], optimizer: Optimizer, as_function: Exception
) -> LRScheduler:
    try:
        made = factory(optimizer)
    except Exception as error:
        raise RecipeError(
            "schedule is neither step -> multiplier (schedule(0) raised"
            f" {type(as_function).__name__}: {as_function}) nor optimizer -> torch LRScheduler"
            f" (that raised {type(error).__name__}: {error})"
        ) from error
    if not isinstance(made, LRScheduler):
        raise RecipeError(
            f"schedule(optimizer) returned {made!r} (a {type(made).__name__}); it must return a"
            " torch LRScheduler"
        )
    return made
