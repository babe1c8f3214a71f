"""The request for a search, with the checked options of `lockstep search` and `lockstep sweep`; and
the request for a trial."""

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
"""File in the folder of a search, with storage, name, and an identifier of the folder."""
PRUNED = "pruned: "
"""Beginning of the text that a run directory has as the reason why a pruned trial stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    line: ScriptLine
    metric: str
    direction: Direction
    trials: int | None
    """Number of trials, including trials of earlier starts of the search. None: all trials of a
    grid."""
    parallel: int | None
    """Largest number of trials at the same time. None: as many as fit on the machine."""
    sampler: SamplerName
    pruner: PrunerName
    seed: int
    folder: Path
    """The folder of the search, with the run directories of the trials."""
    storage: str | None
    """URL of Optuna's storage. None: an SQLite file in `folder`."""
    name: str
    """Optuna's name of the study in the storage."""
    timeout_seconds: float | None
    launch: LaunchOptions
    """The launch options of each trial. Its `set` contains the parameters that are not searched."""
    sweep: Sequence[tuple[str, Sequence[str]]] = ()
    """For `lockstep sweep`: the hyper-parameters, each with its values as text."""
    population: int = 8
    """Number of members of a population, for population-based training."""

    def __post_init__(self) -> None:
        check_storage(self.storage)

    @property
    def combinations(self) -> list[tuple[str, ...]]:
        """The assignments of each trial of a sweep, in the form of `--set`; the last name changes
        fastest."""
        texts = [[f"{name}={value}" for value in values] for name, values in self.sweep]
        return list(itertools.product(*texts)) if texts else []

    def identity(self) -> Mapping[str, Any]:
        """The fields that must be the same when the search is continued, or when several searches
        share its trials, as JSON."""
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
    """The request of a search to the processes of a trial: to report evaluations, or to report the
    parameters that the script declares instead of training."""

    answered_by: ClassVar[str] = "lockstep.search.trial_hook"
    metric: str
    can_be_pruned: bool
    until: int | None = None
    """The training step after whose evaluation the trial ends. None: at the end of the training."""
    channel: int = -1
    """The descriptor over which rank 0 reports. The fork server sets it."""


def check_storage(url: str | None) -> None:
    """Raise `LaunchError` if the URL of a database contains a password, because every user of a
    machine can see the command lines of processes."""
    if url is not None and has_password(url):
        raise LaunchError(
            f"--storage {without_password(url)} has a password in it, and every user of this"
            " machine sees command lines; a password is read from a file or an environment"
            " variable; leave it out: PostgreSQL reads PGPASSWORD or ~/.pgpass, MySQL the option"
            " file in ?read_default_file=/home/me/.my.cnf"
        )


def direction_of(metric: str, mode: str | None) -> Direction:
    """Return whether the metric is minimized or maximized, from `--mode` or the metric's name.
    Raises `LaunchError` if neither `mode` nor the metric's name determines it."""
    if mode is not None:
        return "minimize" if mode == "min" else "maximize"
    if metric.rpartition("/")[2] == "loss" or "loss/" in metric:
        return "minimize"
    raise LaunchError(
        f"--metric {metric} without --mode; only for a loss is it known that less is better; give"
        " --mode min, or --mode max"
    )


def sweep_of(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the names and values of options such as `--set lr=1e-3,3e-3`. Raises `LaunchError`,
    `RecipeError`."""
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
