"""The trials of a search in Optuna's storage.

A search locks a file in its folder for each trial that it runs. The operating system releases the
lock when the search ends. A trial that the storage marks as running, but that has no lock, was
interrupted: the next search of the folder resumes it. Searches of other folders ignore an
interrupted trial.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from lockstep.base.errors import LaunchError, RecipeError
from lockstep.base.files import check_kinds, read_object, replace_atomically, try_lock
from lockstep.base.urls import without_password
from lockstep.recipe.code import other_sources
from lockstep.recipe.parameters import Parameter
from lockstep.search.database import (
    alone,
    existing_study,
    opened_study,
    reachable,
    shown,
    study_in_file,
)
from lockstep.search.outcome import TrialOutcome
from lockstep.search.request import SEARCH, SearchRequest
from lockstep.search.results import SearchResults, State, TrialResult

DATABASE = "search.db"
"""The SQLite file of a search without `--storage`."""
_STATES: Mapping[TrialState, State] = {
    TrialState.WAITING: "waiting", TrialState.RUNNING: "running", TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}  # fmt: skip
_OPTUNA_STATES = {state: theirs for theirs, state in _STATES.items()}


@dataclass(frozen=True, slots=True)
class ClaimedTrial:
    trial: Trial
    is_resumed: bool
    """True if an interrupted search started the trial."""

    @property
    def number(self) -> int:
        return self.trial.number


class TrialStorage:
    def __init__(self, request: SearchRequest) -> None:
        self._request = request
        self.folder = request.folder
        self._make_folder()
        self.url = own_file(self.folder) if request.storage is None else request.storage
        self._locks: dict[int, int] = {}
        self._parameters: list[Parameter] | None = None
        self._wanted: int | None = None
        self._told = {"storage": request.storage, "name": request.name}
        self._read_folder()
        with alone(self.url, request.name), reachable(self.url):
            self.study = opened_study(self.url, request.name, request.direction)
            identity = self._read_folder().get("identity")
            if identity is not None and "search" not in self.study.user_attrs:
                where = self.folder / DATABASE if request.storage is None else shown(self.url)
                raise LaunchError(
                    f"--run-dir {self.folder} has the trials of a search, but the study is missing"
                    f" from {where}; restore that storage, or give another folder"
                )
            self._check_search()
            if identity is None:
                identity = secrets.token_hex(8)
                told = json.dumps({**self._told, "identity": identity})
                with replace_atomically(self.folder / SEARCH) as temporary:
                    temporary.write_text(told, encoding="utf-8")
            self._identity = str(identity)

    def _make_folder(self) -> None:
        if (self.folder / "run.json").exists():
            raise LaunchError(
                f"--run-dir {self.folder} holds a run; a search needs its own folder; give another"
                " one"
            )
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"--run-dir {self.folder} cannot be made: {error.strerror}; a search writes to it;"
                " give a folder that can be made"
            ) from error

    def _read_folder(self) -> dict[str, Any]:
        try:
            stored = read_object(self.folder, SEARCH)
        except (OSError, ValueError):
            return {}
        if {key: stored[key] for key in self._told} != self._told:
            raise LaunchError(
                f"--run-dir {self.folder} holds the search {stored['name']!r} in"
                f" {shown(stored['storage'])}; a folder holds one search; give its --name and"
                " --storage, or another folder"
            )
        return stored

    def _check_search(self) -> None:
        """Check that the study belongs to this search. The metric may still be changed before the
        first trial has reported its parameters."""
        identity, before = self._request.identity(), self.study.user_attrs.get("search")
        is_same_way = self.study.direction.name.lower() == self._request.direction
        is_open = "parameters" not in self.study.user_attrs and is_same_way
        if before is None or (before != identity and is_open):
            self.study.set_user_attr("search", identity)
            return
        changed = [key for key in identity if before[key] != identity[key]]
        if changed:
            changes = "; ".join(f"{key}: {before[key]!r}, now {identity[key]!r}" for key in changed)
            raise RecipeError(
                f"the search {self.study.study_name!r} in {shown(self.url)} is a different search:"
                f" {changes}; the trials of a search are compared with each other; give the values"
                " with which it was begun, or begin another (--run-dir, or --name)"
            )

    @property
    def parameters(self) -> list[Parameter] | None:
        """Hyper-parameters of the script; None before the first trial has reported them."""
        stored = self.study.user_attrs.get("parameters") if self._parameters is None else None
        if stored is not None:
            self._check_search()  # another search that began at the same time may have stored them
            self._parameters = [Parameter.of(each) for each in stored]
        return self._parameters

    def note_parameters(self, described: Sequence[Mapping[str, Any]]) -> None:
        with alone(self.url, self._request.name):
            self._check_search()
            if "parameters" not in self.study.user_attrs:
                self.study.set_user_attr("parameters", list(described))

    def check_programs(self, programs: Mapping[str, str]) -> None:
        """Raise `RecipeError` if the script has changed since a trial reported a metric."""
        with alone(self.url, self._request.name):
            before, trials = self.study.user_attrs.get("programs"), self._trials()
            has_values = any(each.intermediate_values or each.value is not None for each in trials)
            if before is None or not has_values:
                self.study.set_user_attr("programs", dict(programs))
            elif changed := other_sources(before, programs):
                names = ", ".join(
                    "the script" if name == "__main__" else f"the module {name}" for name in changed
                )
                raise RecipeError(
                    f"{names} was edited since the search {self.study.study_name!r} began; the"
                    " trials of a search are compared with each other; undo the change, or begin"
                    " another search (--run-dir, or --name)"
                )

    def note_wanted(self, wanted: int) -> None:
        if self._wanted != wanted:
            self.study.set_user_attr("wanted", wanted)
            self._wanted = wanted

    def note_seconds(self, claimed: ClaimedTrial, seconds: float) -> None:
        before = claimed.trial.user_attrs.get("seconds", 0.0)
        claimed.trial.set_user_attr("seconds", before + seconds)

    def claim(self, wanted: int) -> ClaimedTrial | None:
        """Return an interrupted trial, or a new one with a number below `wanted`. Return None if no
        trial can be claimed."""
        with alone(self.url, self._request.name):
            trials, storage = self._trials(), self.study._storage
            for trial in trials:
                if trial.state == TrialState.RUNNING and self._is_interrupted(trial):
                    return ClaimedTrial(Trial(self.study, trial._trial_id), is_resumed=True)
            for trial in trials:
                is_next = trial.state == TrialState.WAITING and trial.number < wanted
                if is_next and self._begin(trial.number, trial._trial_id):
                    return ClaimedTrial(Trial(self.study, trial._trial_id), is_resumed=False)
            while len(trials) < wanted:
                attributes = self._attributes(len(trials))
                waiting = create_trial(state=TrialState.WAITING, user_attrs=attributes)
                trial_id = storage.create_new_trial(self.study._study_id, template_trial=waiting)
                number = storage.get_trial(trial_id).number
                if number < wanted and self._begin(number, trial_id):
                    return ClaimedTrial(Trial(self.study, trial_id), is_resumed=False)
                trials = self._trials()
        return None

    def _trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _attributes(self, number: int) -> dict[str, Any]:
        return {"folder": self._identity, "run_dir": str(self.run_dir(number).absolute())}

    def _is_interrupted(self, trial: FrozenTrial) -> bool:
        """Try to lock a trial that is marked as running. Return True if no other search runs the
        trial."""
        if trial.user_attrs.get("folder") != self._identity or not self._lock(trial.number):
            return False
        if self.study._storage.get_trial(trial._trial_id).state == TrialState.RUNNING:
            return True
        self.release(trial.number)
        return False

    def _begin(self, number: int, trial_id: int) -> bool:
        storage = self.study._storage
        if not self._lock(number):
            return False
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            # stored before the trial counts as begun, because a search that is killed in between is
            # resumed
            for key, value in self._attributes(number).items():
                if storage.get_trial(trial_id).user_attrs.get(key) != value:
                    storage.set_trial_user_attr(trial_id, key, value)
            if storage.set_trial_state_values(trial_id, TrialState.RUNNING):
                return True
        self.release(number)
        return False

    def run_dir(self, number: int) -> Path:
        return self.folder / f"trial-{number:04d}"

    def report(self, claimed: ClaimedTrial, step: int, value: float) -> bool:
        self._note_value(claimed, step, value)
        return bool(claimed.trial.should_prune())  # some pruners return numpy's bool

    def _note_value(self, claimed: ClaimedTrial, step: int, value: float) -> None:
        if step not in self.study._storage.get_trial(claimed.trial._trial_id).intermediate_values:
            claimed.trial.report(value, step)

    def end(self, claimed: ClaimedTrial, outcome: TrialOutcome) -> None:
        """Store a trial's outcome, and release its lock. An interrupted trial stays marked as
        running."""
        if outcome.state != "running":
            if outcome.reason is not None:
                claimed.trial.set_user_attr("reason", outcome.reason[:2000])
            if outcome.steps is not None and outcome.value is not None:
                self._note_value(claimed, outcome.steps, outcome.value)
            values = outcome.value if outcome.state == "complete" else None
            self.study.tell(claimed.trial, values, state=_OPTUNA_STATES[outcome.state])
        self.release(claimed.number)

    def has_unfinished(self, wanted: int) -> bool:
        trials = [trial for trial in self._trials() if trial.number < wanted]
        if len(trials) < wanted or any(each.state == TrialState.WAITING for each in trials):
            return True
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        return any(trial.user_attrs.get("folder") == self._identity for trial in running)

    def note(self, name: str, value: Any) -> None:
        if value is not None and name not in self.study.user_attrs:
            self.study.set_user_attr(name, value)

    def fact(self, name: str) -> Any:
        return self.study.user_attrs.get(name)

    def results(self) -> SearchResults:
        return results_of(self.study)

    def _lock(self, number: int) -> bool:
        if number in self._locks:
            return False
        descriptor = os.open(self.folder / "locks" / f"{number:04d}", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try_lock(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._locks[number] = descriptor
        return True

    def release(self, number: int) -> None:
        os.close(self._locks.pop(number))


def check_parameters(searched: Sequence[Parameter], now: Sequence[Parameter]) -> None:
    """Raise `RecipeError` unless the script still declares the parameters with which the search
    began."""
    before = {each.name: each.describe() for each in searched}
    after = {each.name: each.describe() for each in now}
    changes = [f"{name} is new" for name in after if name not in before]
    for name, old in before.items():
        new = after.get(name)
        if new is None:
            changes.append(f"{name} is gone")
            continue
        changed = [key for key in old if old[key] != new[key]]
        changes += [f"{name} has {key}={new[key]!r}, and had {old[key]!r}" for key in changed]
    if changes:
        raise RecipeError(
            f"the script's parameters differ from the search's: {'; '.join(changes)}; all trials of"
            " a search have the same parameters; undo the change, or begin another search"
            " (--run-dir, or --name)"
        )


def results_of(study: optuna.Study) -> SearchResults:
    attributes = study.user_attrs
    identity, wanted = attributes["search"], attributes.get("wanted", 0)
    trials = [
        _result(trial)
        for trial in study.get_trials(deepcopy=False)
        if trial.number < wanted or trial.state != TrialState.WAITING
    ]
    return SearchResults(
        name=study.study_name,
        script=shlex.join(identity["script"]),
        metric=identity["metric"],
        direction=identity["direction"],
        wanted=max(wanted, len(trials)),
        parameters=[Parameter.of(each) for each in attributes.get("parameters", [])],
        trials=trials,
    )


def _result(trial: FrozenTrial) -> TrialResult:
    told, began, ended = trial.user_attrs, trial.datetime_start, trial.datetime_complete
    value = trial.value
    if value is None and trial.last_step is not None:
        value = trial.intermediate_values.get(trial.last_step)
    return TrialResult(
        number=trial.number,
        state=_STATES[trial.state],
        parameters={**trial.params, **told.get("values", {})},
        value=value,
        values=dict(trial.intermediate_values),
        started=None if began is None else began.timestamp(),
        ended=None if ended is None else ended.timestamp(),
        reason=told.get("reason"),
        run_dir=told.get("run_dir", ""),
        parent=told.get("parent"),
        ran=told.get("seconds"),
    )


def importance_of(study: optuna.Study) -> dict[str, float]:
    """Return the share of the metric's variance that each parameter explains, by PED-ANOVA
    (Watanabe et al. 2023). Return an empty dict if the study has too few trials."""
    if len(study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])) < 2:
        return {}
    # imports scikit-learn, if it is installed
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # too few trials
            return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    except (ValueError, RuntimeError):
        return {}


def study_of(folder: Path, storage: str | None = None) -> optuna.Study:
    """Open a study for reading. The folder may be untrusted, so no database other than `storage` is
    contacted."""
    told = _told(folder)
    if storage is not None:
        study = existing_study(storage, told["name"])
    elif told["storage"] is not None:
        url = without_password(told["storage"])
        raise LaunchError(
            f"{SEARCH} in {folder} names the database {url}; lockstep connects only to a database"
            f" that you name yourself; give --storage {url}"
        )
    else:
        study = study_in_file(folder / DATABASE, told["name"])
    if "search" not in study.user_attrs:
        raise LaunchError(
            f"the search of {folder} was ended before it had begun; there is nothing to report;"
            " continue it"
        )
    return study


def results_in(folder: Path, storage: str | None) -> tuple[SearchResults, dict[str, float]]:
    study = study_of(folder, storage)
    try:
        with reachable(storage or str(folder / DATABASE)):
            results = results_of(study)
            results.check_kinds()
            return results, importance_of(study)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecipeError,
    ) as error:
        raise LaunchError(
            f"the search of {folder} has values that no search writes ({error!r}); it is not read"
        ) from error


def _told(folder: Path) -> dict[str, Any]:
    try:
        told = read_object(folder, SEARCH)
        check_kinds(told, {"storage": str, "name": str, "identity": str})
        return {"storage": told.get("storage"), "name": told["name"]}
    except OSError as error:
        raise LaunchError(
            f"{folder / SEARCH} cannot be read ({error.strerror}); it has the storage and the name"
            " of the search"
        ) from error
    except (ValueError, KeyError) as error:
        raise LaunchError(
            f"{folder / SEARCH} is damaged: {error}; it has the storage and the name of the search"
        ) from error


def own_file(folder: Path) -> str:
    return f"sqlite:///{folder.absolute() / DATABASE}"
