"""The request for a search, and the request for one of its trials."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from lockstep.base.errors import LaunchError
from lockstep.base.urls import has_password, without_password
from lockstep.options import LaunchOptions
from lockstep.recipe.parameters import split_assignment
from lockstep.scripts.line import ScriptLine
from lockstep.scripts.request import ScriptRequest
from lockstep.search.results import Direction

SamplerName = Literal["tpe", "random", "grid", "cma", "pbt"]
PrunerName = Literal["asha", "median", "none"]
SEARCH = "search.json"
"""A file in the search's folder that names the storage and the study."""
PRUNED = "pruned: "


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    line: ScriptLine
    metric: str
    direction: Direction
    trials: int | None
    parallel: int | None
    sampler: SamplerName
    pruner: PrunerName
    seed: int
    folder: Path
    storage: str | None
    name: str
    timeout_seconds: float | None
    launch: LaunchOptions
    """Launch options of each trial. The option `set` contains the parameters that are not
    searched."""
    sweep: Sequence[tuple[str, Sequence[str]]] = ()
    population: int = 8

    @property
    def combinations(self) -> list[tuple[str, ...]]:
        """The assignments of each trial of a sweep, as for `--set`."""
        texts = [[f"{name}={value}" for value in values] for name, values in self.sweep]
        return list(itertools.product(*texts)) if texts else []

    def identity(self) -> Mapping[str, Any]:
        """Return the fields that must not change when a search is continued."""
        return {
            "script": self.line.words,
            "metric": self.metric,
            "direction": self.direction,
            "set": sorted(self.launch.set),
            "population": (
                f"{self.trials} trials, {self.population} members"
                if self.sampler == "pbt"
                else None
            ),
            "sweep": [f"{name}={','.join(values)}" for name, values in self.sweep],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRequest(ScriptRequest):
    answered_by: ClassVar[str] = "lockstep.search.trial_hook"
    metric: str
    can_be_pruned: bool
    until: int | None = None
    """The trial ends after the evaluation at this step; None if it trains to the end."""
    channel: int = -1


def check_storage(url: str | None) -> None:
    if url is not None and has_password(url):
        raise LaunchError(
            f"--storage {without_password(url)} has a password in it, and every user of this"
            " machine sees command lines; a password is read from a file or an environment"
            " variable; leave it out: PostgreSQL reads PGPASSWORD or ~/.pgpass, MySQL the option"
            " file in ?read_default_file=/home/me/.my.cnf"
        )


def direction_of(metric: str, mode: str | None) -> Direction:
    if mode is not None:
        return "minimize" if mode == "min" else "maximize"
    if metric.rpartition("/")[2] == "loss" or "loss/" in metric:
        return "minimize"
    raise LaunchError(
        f"--metric {metric} without --mode; only for a loss is it known that less is better; give"
        " --mode min, or --mode max"
    )


def sweep_of(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    if not texts:
        raise LaunchError(
            "a sweep without --set; it trains with each combination of values; give --set"
            " lr=1e-3,3e-3"
        )
    values_by_name: dict[str, list[str]] = {}
    for text in texts:
        name, values = split_assignment(text)
        if name in values_by_name:
            raise LaunchError(
                f"--set {name} is given twice; all its values are one list: --set"
                f" {name}={','.join(values_by_name[name])},{values}"
            )
        values_by_name[name] = values.split(",")
        if len(set(values_by_name[name])) < len(values_by_name[name]):
            raise LaunchError(
                f"--set {text} has a value twice; each combination is one trial; give each value"
                " once"
            )
    return list(values_by_name.items())
