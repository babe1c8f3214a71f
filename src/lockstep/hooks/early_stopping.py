"""The hook that ends training when a metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from lockstep.base.errors import RecipeError
from lockstep.hooks.metrics import check_metric
from lockstep.training.hook import Hook
from lockstep.training.run import Run


class EarlyStopping(Hook):
    """Ends training when a metric of the evaluation no longer improves."""

    def __init__(
        self,
        metric: str = "loss",
        *,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        """Training ends after `patience` evaluations in which `metric` did not improve by more than
        `min_delta`. `mode` is "min" if a smaller value is better, else "max". Raises `RecipeError`
        for invalid arguments, and `ls.train` raises it for a metric that no evaluation measures."""
        if patience < 1:
            raise RecipeError(f"patience={patience}; it counts evaluations and is at least 1")
        if mode not in ("min", "max"):
            raise RecipeError(f"mode={mode!r}; it must be 'min' if less is better, or 'max'")
        if not min_delta >= 0:
            raise RecipeError(
                f"min_delta={min_delta}; it must be the smallest change that counts as an"
                " improvement, 0 or more"
            )
        self.metric = metric
        self.best: float | None = None
        self._patience = patience
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta
        self._waited = 0

    def on_start(self, run: Run) -> None:
        self.best, self._waited = None, 0
        if run.recipe is None or all(
            each.every is None for each in run.recipe.evaluations.values()
        ):
            raise RecipeError(
                "EarlyStopping without Recipe.evaluation, or with every=None; it watches"
                " evaluations; give ls.Evaluation(every=...)"
            )
        check_metric(run, self.metric, f"EarlyStopping watches {self.metric!r}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self._waited = state["best"], state["waited"]

    def after_evaluation(self, run: Run, metrics: dict[str, float]) -> None:
        if self.metric not in metrics:
            run.training.metric(self.metric, f"EarlyStopping watches {self.metric!r}")
            return
        value = metrics[self.metric]
        if not math.isnan(value) and (
            self.best is None or self._sign * value < self._sign * self.best - self._min_delta
        ):
            self.best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            best = math.nan if self.best is None else self.best
            run.stop(f"{self.metric} has not improved on {best:.6g} for {self._waited} evaluations")
