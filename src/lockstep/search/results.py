"""The results of a search: its trials, and the best trial."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lockstep.base.files import finite
from lockstep.recipe.parameters import Parameter, Value

State = Literal["waiting", "running", "complete", "pruned", "failed"]
ENDED: tuple[State, ...] = ("complete", "pruned", "failed")
Direction = Literal["minimize", "maximize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    number: int
    state: State
    parameters: Mapping[str, Value]
    value: float | None = None
    """The metric at the end of the training. For a pruned trial, the metric of its last evaluation
    before the pruning."""
    values: Mapping[int, float] = field(default_factory=dict)
    """Maps the steps of evaluations to the metric."""
    started: float | None = None
    ended: float | None = None
    reason: str | None = None
    run_dir: str = ""
    parent: int | None = None
    """The trial from whose checkpoint this trial continued, in population-based training."""

    ran: float | None = None

    @property
    def seconds(self) -> float | None:
        """Duration of the trial, without interruptions if they are known. None before the trial has
        ended."""
        if self.started is None or self.ended is None:
            return None
        return self.ended - self.started if self.ran is None else self.ran

    @property
    def steps(self) -> int:
        return max(self.values, default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResults:
    name: str
    script: str
    metric: str
    direction: Direction
    wanted: int
    parameters: Sequence[Parameter]
    trials: Sequence[TrialResult]

    @property
    def best(self) -> TrialResult | None:
        return next(iter(self.ranked), None)

    @property
    def ranked(self) -> list[TrialResult]:
        done = [
            trial
            for trial in self.trials
            if trial.state == "complete" and finite(trial.value) is not None
        ]
        return sorted(done, key=lambda trial: (self.sign * (trial.value or 0.0), trial.number))

    @property
    def sign(self) -> float:
        return 1.0 if self.direction == "minimize" else -1.0

    @property
    def varied(self) -> list[str]:
        """Names of the parameters that are searched, or whose values differ between trials."""
        names = dict.fromkeys(
            [*self.searched, *(name for trial in self.trials for name in trial.parameters)]
        )
        searched = set(self.searched)
        return [
            name
            for name in names
            if name in searched
            or len({repr(t.parameters[name]) for t in self.trials if name in t.parameters}) > 1
        ]

    @property
    def searched(self) -> list[str]:
        return [parameter.name for parameter in self.parameters if parameter.is_searched]

    @property
    def ended(self) -> int:
        return self.count(*ENDED)

    def count(self, *states: State) -> int:
        return sum(trial.state in states for trial in self.trials)

    def best_over_time(self) -> list[tuple[float, float, int]]:
        improvements: list[tuple[float, float, int]] = []
        done = [
            (trial.ended, trial.number, trial.value)
            for trial in self.ranked
            if trial.ended is not None
        ]
        for ended, number, value in sorted(done):
            if value is not None and (
                not improvements or self.sign * value < self.sign * improvements[-1][1]
            ):
                improvements.append((ended, value, number))
        return improvements

    def check_kinds(self) -> None:
        texts = [
            self.name,
            self.script,
            self.metric,
            *(text for each in self.trials for text in (each.run_dir, each.reason or "")),
        ]
        numbers = [number for each in self.trials for number in (each.parent or 0, each.ran or 0.0)]
        values = [value for each in self.trials for value in each.parameters.values()]
        for found, kind in (
            (texts, str),
            (numbers, (int, float)),
            (values, Value),
            ([self.wanted], int),
        ):
            if wrong := [value for value in found if not isinstance(value, kind)]:
                raise TypeError(f"{wrong[0]!r:.40} in the place of {kind}")
        if self.direction not in get_args(Direction):
            raise TypeError(f"{self.direction!r} is not a direction")

    def as_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "name": self.name, "script": self.script, "metric": self.metric,
            "direction": self.direction, "wanted": self.wanted,
            "best": None if best is None else _as_json(best),
            "trials": [_as_json(trial) for trial in self.trials],
        }  # fmt: skip

    def as_csv(self) -> str:
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.parameters))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            ["number", "state", self.metric, "steps", "seconds", *names, "run_dir", "reason"]
        )
        for trial in self.trials:
            seconds = None if trial.seconds is None else round(trial.seconds, 3)
            given = [trial.parameters.get(name) for name in names]
            writer.writerow(
                [
                    trial.number,
                    trial.state,
                    trial.value,
                    trial.steps,
                    seconds,
                    *given,
                    trial.run_dir,
                    trial.reason,
                ]
            )
        return text.getvalue()


def _as_json(trial: TrialResult) -> dict[str, Any]:
    return {
        "number": trial.number, "state": trial.state, "value": finite(trial.value),
        "parameters": dict(trial.parameters),
        "steps": trial.steps, "seconds": trial.seconds, "started": trial.started,
        "ended": trial.ended, "reason": trial.reason,
        "run_dir": trial.run_dir, "parent": trial.parent,
        "values": {str(step): finite(value) for step, value in sorted(trial.values.items())},
    }  # fmt: skip
