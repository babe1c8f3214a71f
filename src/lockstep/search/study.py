"""The trials of a search in Optuna's storage: which one is next, whose it is, and how it has ended.

[Note: whose a trial is] A search that runs a trial holds a lock on a file of the search's folder, which the system
releases however the search ends. A trial that the storage calls running, and whose lock is free, was interrupted: the
next search of that folder resumes it. Searches of other folders, which may be on other machines, leave it alone.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import StorageInternalError
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from lockstep.base.errors import LaunchError, RecipeError
from lockstep.base.file_lock import try_lock
from lockstep.base.files import write_atomically
from lockstep.recipe.parameters import Parameter
from lockstep.search.outcome import Outcome
from lockstep.search.request import SEARCH, SearchRequest
from lockstep.search.results import Direction, SearchResults, State, TrialResult

_STATES: Mapping[TrialState, State] = {
    TrialState.WAITING: "waiting", TrialState.RUNNING: "running", TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}  # fmt: skip
_OPTUNA_STATES = {state: theirs for theirs, state in _STATES.items()}
_FAILURES = (StorageInternalError, SQLAlchemyError, OSError)
_OPENING_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class ClaimedTrial:
    """A trial that this search runs."""

    trial: Trial
    is_resumed: bool
    """True if an earlier search had begun it."""

    @property
    def number(self) -> int:
        return self.trial.number


class TrialStorage:
    """The trials of one search. Raises `LaunchError` where the storage cannot be reached."""

    def __init__(self, request: SearchRequest) -> None:
        """Open the storage, and make the study in it unless it is there. Raises `RecipeError` if it is of another
        search."""
        self._request = request
        self.folder = request.folder
        (self.folder / "locks").mkdir(parents=True, exist_ok=True)
        self.url = request.storage or f"sqlite:///{self.folder.absolute() / 'search.db'}"
        self._locks: dict[int, int] = {}
        self._parameters: list[Parameter] | None = None
        self._wanted: int | None = None
        self._identity = self._identify()
        with self._alone():
            self.study = _opened(self.url, request.name, request.direction)
            self._check(request.identity())

    def _identify(self) -> str:
        """Return the identity of the folder, which is made with it. Raises `LaunchError` if it is another search's."""
        path = self.folder / SEARCH
        told = {"storage": self._request.storage, "name": self._request.name}
        with suppress(OSError, ValueError):
            found = json.loads(path.read_text(encoding="utf-8"))
            if {key: found[key] for key in told} != told:
                raise LaunchError(
                    f"--run-dir {self.folder} holds the search {found['name']!r} in {shown(found['storage'])}; a folder holds one search; "
                    "give its --name and --storage, or another folder"
                )
            return str(found["identity"])
        identity = secrets.token_hex(8)
        write_atomically(path, json.dumps({**told, "identity": identity}))
        return identity

    def _check(self, identity: Mapping[str, Any]) -> None:
        before = self.study.user_attrs.get("search")
        if before is None:
            self.study.set_user_attr("search", identity)
            return
        found = [f"{key}: {before[key]!r}, now {identity[key]!r}" for key in identity if before[key] != identity[key]]
        if found:
            raise RecipeError(
                f"the search {self.study.study_name!r} in {shown(self.url)} is another one: {'; '.join(found)}; the trials of a search are "
                "compared with each other; give what it was begun with, or begin another (--run-dir, or --name)"
            )

    @property
    def parameters(self) -> list[Parameter] | None:
        """The parameters of the script. None until a trial has told them."""
        if self._parameters is None and (found := self.study.user_attrs.get("parameters")) is not None:
            self._parameters = [Parameter.of(each) for each in found]
        return self._parameters

    def note_parameters(self, described: Sequence[Mapping[str, Any]]) -> None:
        """Keep the parameters of the script, unless another search has."""
        if "parameters" not in self.study.user_attrs:
            self.study.set_user_attr("parameters", list(described))

    def note_wanted(self, wanted: int) -> None:
        """Keep the number of trials that the search is to have."""
        if self._wanted != wanted:
            self.study.set_user_attr("wanted", wanted)
            self._wanted = wanted

    def claim(self, wanted: int) -> ClaimedTrial | None:
        """Return a trial to run, of the first `wanted`: one that was interrupted, or else a new one. None if there is
        none."""
        with self._alone():
            trials = self.study.get_trials(deepcopy=False)
            for trial in trials:
                if trial.state == TrialState.RUNNING and self._is_interrupted(trial):
                    return ClaimedTrial(Trial(self.study, trial._trial_id), is_resumed=True)
            for trial in trials:
                if trial.state == TrialState.WAITING and trial.number < wanted and self._begin(trial.number, trial._trial_id):
                    return ClaimedTrial(Trial(self.study, trial._trial_id), is_resumed=False)
            while len(trials) < wanted:
                waiting = create_trial(state=TrialState.WAITING, user_attrs=self._attributes(len(trials)))
                trial_id = self.study._storage.create_new_trial(self.study._study_id, template_trial=waiting)
                number = self.study._storage.get_trial(trial_id).number
                if number < wanted and self._begin(number, trial_id):
                    return ClaimedTrial(Trial(self.study, trial_id), is_resumed=False)
                trials = self.study.get_trials(deepcopy=False)
        return None

    def _attributes(self, number: int) -> dict[str, Any]:
        return {"folder": self._identity, "run_dir": str(self.run_dir(number).absolute())}

    def _is_interrupted(self, trial: FrozenTrial) -> bool:
        """Lock a running trial if it is of this folder and nobody runs it. Returns True if it is now this search's."""
        if trial.user_attrs.get("folder") != self._identity or not self._lock(trial.number):
            return False
        if self.study._storage.get_trial(trial._trial_id).state == TrialState.RUNNING:
            return True
        self.release(trial.number)
        return False

    def _begin(self, number: int, trial_id: int) -> bool:
        """Take a waiting trial. Returns False if another search was faster."""
        storage = self.study._storage
        if not self._lock(number):
            return False
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            if storage.set_trial_state_values(trial_id, TrialState.RUNNING):
                for key, value in self._attributes(number).items():
                    if storage.get_trial(trial_id).user_attrs.get(key) != value:
                        storage.set_trial_user_attr(trial_id, key, value)
                return True
        self.release(number)
        return False

    def run_dir(self, number: int) -> Path:
        """Return a trial's run directory."""
        return self.folder / f"trial-{number:04d}"

    def suggest(self, claimed: ClaimedTrial, distributions: Mapping[str, BaseDistribution]) -> dict[str, Any]:
        """Return the values of a trial's searched parameters: those that it has already, or new ones."""
        return {name: claimed.trial._suggest(name, distribution) for name, distribution in distributions.items()}

    def report(self, claimed: ClaimedTrial, step: int, value: float) -> bool:
        """Note the metric after a step. Returns True if the trial is to be pruned."""
        if step not in self.study._storage.get_trial(claimed.trial._trial_id).intermediate_values:
            claimed.trial.report(value, step)
        return bool(claimed.trial.should_prune())  # numpy's of some pruners

    def end(self, claimed: ClaimedTrial, outcome: Outcome) -> None:
        """Note the end of a trial, and release it; one that was interrupted stays to be resumed."""
        if outcome.state != "running":
            if outcome.reason is not None:
                claimed.trial.set_user_attr("reason", outcome.reason[:2000])
            values = outcome.value if outcome.state == "complete" else None
            self.study.tell(claimed.trial, values, state=_OPTUNA_STATES[outcome.state])
        self.release(claimed.number)

    def has_unfinished(self, wanted: int) -> bool:
        """Return True if trials are left for a search of this folder: they wait, or were begun here."""
        trials = [trial for trial in self.study.get_trials(deepcopy=False) if trial.number < wanted]
        return len(trials) < wanted or any(
            trial.state == TrialState.WAITING or (trial.state == TrialState.RUNNING and trial.user_attrs.get("folder") == self._identity)
            for trial in trials
        )

    def note(self, name: str, value: Any) -> None:
        """Keep a fact of the search, unless it is known, or None."""
        if value is not None and name not in self.study.user_attrs:
            self.study.set_user_attr(name, value)

    def fact(self, name: str) -> Any:
        """Return what `note` has kept. None if it has not."""
        return self.study.user_attrs.get(name)

    def results(self) -> SearchResults:
        """Return all trials as they are now."""
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
        """Let another search run the trial."""
        os.close(self._locks.pop(number))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of an SQLite file, whose transactions do not keep two searches from taking one trial. Other
        databases lock the row."""
        url = _parsed(self.url)
        if url.get_backend_name() != "sqlite" or not url.database:
            yield
            return
        path = Path(f"{url.database}.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            while True:
                with suppress(BlockingIOError):
                    try_lock(descriptor)
                    break
                time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)


def results_of(study: optuna.Study) -> SearchResults:
    """Return the trials of a study: as many as it is to have. Those beyond were never begun."""
    attributes = study.user_attrs
    wanted = attributes.get("wanted", 0)
    parameters = [Parameter.of(each) for each in attributes.get("parameters", [])]
    trials = [_result(trial) for trial in study.get_trials(deepcopy=False) if trial.number < wanted]
    identity = attributes["search"]
    return SearchResults(
        name=study.study_name,
        script=shlex.join(identity["script"]),
        metric=identity["metric"],
        direction=identity["direction"],
        wanted=wanted,
        parameters=parameters,
        trials=trials,
    )


def _result(trial: FrozenTrial) -> TrialResult:
    last = trial.intermediate_values.get(trial.last_step) if trial.last_step is not None else None
    return TrialResult(
        number=trial.number,
        state=_STATES[trial.state],
        parameters={**trial.params, **trial.user_attrs.get("values", {})},
        value=trial.value if trial.value is not None else last,
        values=dict(trial.intermediate_values),
        started=None if trial.datetime_start is None else trial.datetime_start.timestamp(),
        ended=None if trial.datetime_complete is None else trial.datetime_complete.timestamp(),
        reason=trial.user_attrs.get("reason"),
        run_dir=trial.user_attrs.get("run_dir", ""),
        parent=trial.user_attrs.get("parent"),
    )


def importance_of(study: optuna.Study) -> dict[str, float]:
    """Return how much of the metric's variation each parameter explains, by PED-ANOVA (Watanabe et al. 2023). Empty if
    there are too few trials."""
    try:
        return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    except (ValueError, RuntimeError):
        return {}


def opened_study(folder: Path) -> optuna.Study:
    """Return the study of a search's folder, to be read. Raises `LaunchError`."""
    try:
        told = json.loads((folder / SEARCH).read_text(encoding="utf-8"))
    except ValueError as error:
        raise LaunchError(f"{folder / SEARCH} is damaged: {error}; it has the storage and the name of the search") from error
    url = told["storage"] or f"sqlite:///{folder.absolute() / 'search.db'}"
    return _opened(url, told["name"], None)


def _opened(url: str, name: str, direction: Direction | None) -> optuna.Study:
    """Return the study, made if it is not there. `direction`: None if it must be there."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    arguments = {"connect_args": {"timeout": 60}} if _parsed(url).get_backend_name() == "sqlite" else {"pool_pre_ping": True}
    for attempt in range(_OPENING_ATTEMPTS):
        try:
            storage = RDBStorage(url, engine_kwargs=arguments)
            if direction is None:
                return optuna.load_study(study_name=name, storage=storage)
            return optuna.create_study(study_name=name, storage=storage, direction=direction, load_if_exists=True)
        except KeyError:
            raise LaunchError(
                f"{shown(url)} has no search {name!r}; it may be another file or database; give the one it was made in"
            ) from None
        except ModuleNotFoundError as error:
            raise LaunchError(f"--storage {shown(url)} needs the package {error.name}; install it: pip install {error.name}") from error
        except _FAILURES as error:
            if attempt == _OPENING_ATTEMPTS - 1:  # two searches that make the tables at once disturb each other
                raise unreachable(url, error) from error
            time.sleep(0.1)
    raise AssertionError("the last attempt returns or raises")


def unreachable(url: str, error: BaseException) -> LaunchError:
    """Return the error for a storage that cannot be reached."""
    cause = str(getattr(error.__cause__, "orig", None) or error.__cause__ or error).strip().partition("\n")[0]
    return LaunchError(
        f"--storage {shown(url)} cannot be reached: {cause}; correct the address, or start the database; the same command goes on"
    )


def _parsed(url: str) -> Any:
    try:
        parsed = make_url(url)
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError) as error:
        raise LaunchError(
            f"--storage {url!r}; it is the URL of a database: sqlite:///search.db, postgresql://user@host/name or mysql://user@host/name; "
            "correct it"
        ) from error
    except ModuleNotFoundError as error:
        raise LaunchError(f"--storage {url!r} needs the package {error.name}; install it: pip install {error.name}") from error
    return parsed


def shown(url: str | None) -> str:
    """Return a URL without its password."""
    return "its own SQLite file" if url is None else str(_parsed(url).render_as_string(hide_password=True))
