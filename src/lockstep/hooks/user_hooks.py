"""What people add to training: a small protocol, and the two that most people want."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lockstep.base.errors import RecipeError
from lockstep.comm.mesh import to_local

if TYPE_CHECKING:
    from lockstep.base.events import Event
    from lockstep.run import Run


class Hook:
    """Methods that `train` calls on every rank alike, in the order in which the hooks were given. All do nothing unless overridden."""

    def on_start(self, run: Run) -> None:
        """Before the first step."""

    def on_step(self, run: Run) -> None:
        """After every step, applied or not; `run.step` counts the steps done."""

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        """After every evaluation, with its metrics, the same on every rank."""

    def on_save(self, run: Run) -> None:
        """After the weights were written."""

    def on_event(self, run: Run, event: Event) -> None:
        """When something was written to the run's log of events."""

    def on_end(self, run: Run) -> None:
        """After the last step and evaluation, before the run's result is written."""


def check_hooks(hooks: Any) -> None:
    """Raises `RecipeError` unless `train` can call them."""
    several = hooks if isinstance(hooks, Sequence) else [hooks]
    for hook in several:
        if not isinstance(hook, Hook):
            raise RecipeError(f"hooks has {hook!r}; a hook is an object of a subclass of ls.Hook; make it one")
    if several is not hooks:
        raise RecipeError(f"hooks={hooks!r}; it is a list of hooks; give hooks=[...]")


class EarlyStopping(Hook):
    """End training when a metric has not got better for a while."""

    def __init__(self, metric: str = "loss", *, patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0) -> None:
        """`metric`: of the evaluation. `patience`: evaluations without an improvement of more than `min_delta` before the end."""
        if patience < 1:
            raise RecipeError(f"patience={patience}; it counts evaluations and is at least 1")
        if mode not in ("min", "max"):
            raise RecipeError(f"mode={mode!r}; it is 'min' where less is better, or 'max'")
        if not min_delta >= 0:
            raise RecipeError(f"min_delta={min_delta}; it is how much better counts as better, 0 or more")
        self.metric = metric
        self.best: float | None = None
        self._patience = patience
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta
        self._waited = 0

    def on_start(self, run: Run) -> None:
        self.best, self._waited = None, 0
        if run.recipe.evaluation is None or run.recipe.evaluation.every is None:
            raise RecipeError(
                "EarlyStopping without Recipe.evaluation, or with every=None; it watches evaluations; give ls.Evaluation(every=...)"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self._waited = state["best"], state["waited"]

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics:
            raise RecipeError(f"EarlyStopping watches {self.metric!r}, which is not measured; measured are {', '.join(metrics)}")
        value = metrics[self.metric]
        if not math.isnan(value) and (self.best is None or self._sign * value < self._sign * self.best - self._min_delta):
            self.best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            best = math.nan if self.best is None else self.best
            run.stop(f"{self.metric} has not got better than {best:.6g} for {self._waited} evaluations")


class ExponentialMovingAverage(Hook):
    """Keep a moving average of the weights (Polyak and Juditsky, 1992): after each step, decay × average + (1 - decay) × weights.

    `model_average.safetensors` in the run directory holds it at the end, with the model's buffers as they are.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise RecipeError(f"decay={decay}; it is the share of the old average that stays, from 0 to below 1")
        self.decay = decay
        self._averages: dict[str, Tensor] = {}
        """Of each parameter, laid out as it is."""

    def on_start(self, run: Run) -> None:
        self._averages = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}

    def on_step(self, run: Run) -> None:
        torch._foreach_lerp_(self._held(), _parts(run), 1 - self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        return self._averages

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, average in self._averages.items():
            average.copy_(state[name])

    def on_end(self, run: Run) -> None:
        with self.applied(run):
            run.save("model_average.safetensors", run.model.state_dict())

    @contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        """Within, the model has the averaged weights: to evaluate it, say."""
        parts = _parts(run)
        own = [part.clone() for part in parts]
        torch._foreach_copy_(parts, self._held())
        try:
            yield
        finally:
            torch._foreach_copy_(parts, own)

    def _held(self) -> list[Tensor]:
        return [to_local(average) for average in self._averages.values()]


def _parts(run: Run) -> list[Tensor]:
    """What this rank holds of the parameters."""
    return [to_local(parameter.detach()) for parameter in run.model.parameters()]
