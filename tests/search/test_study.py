"""Whose a trial is: claimed by one search at a time, resumed by the next, and never made twice."""

from __future__ import annotations

import importlib
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import optuna
import pytest
from search.storages import (
    PARAMETERS,
    Open,
    claimed_at_once,
    end_as_killed,
    make_trial,
    proposals,
    request,
)

from lockstep.base.errors import LaunchError, RecipeError
from lockstep.options import LaunchOptions
from lockstep.scripts.line import ScriptLine
from lockstep.search.outcome import TrialOutcome
from lockstep.search.proposals import Proposals
from lockstep.search.results import TrialResult
from lockstep.search.study import TrialStorage, importance_of, results_of, study_of


def number_of(claimed: Any) -> int | None:
    return None if claimed is None else claimed.number


def of_number(opened: TrialStorage, number: int) -> TrialResult:
    return opened.results().trials[number]


class TestClaims:
    def test_trials_are_claimed_in_order_and_no_more_than_wanted(self, storage: Open) -> None:
        opened = storage()
        assert [number_of(opened.claim(3)) for _ in range(5)] == [0, 1, 2, None, None]
        assert number_of(opened.claim(4)) == 3

    def test_one_that_has_ended_is_not_claimed_again(self, storage: Open) -> None:
        opened = storage()
        opened.note_wanted(2)
        for state, value in (("complete", 1.0), ("failed", None)):
            claimed = opened.claim(2)
            assert claimed is not None
            opened.end(claimed, TrialOutcome(state=state, value=value, reason="why"))  # type: ignore[arg-type]
        assert opened.claim(2) is None
        assert storage().claim(2) is None
        assert [(trial.state, trial.value, trial.reason) for trial in opened.results().trials] == [
            ("complete", 1.0, "why"),
            ("failed", None, "why"),
        ]

    def test_one_of_a_search_that_was_killed_is_resumed_before_new_ones_begin(
        self, storage: Open
    ) -> None:
        first = storage()
        assert [number_of(first.claim(4)) for _ in range(2)] == [0, 1]
        assert number_of(storage().claim(4)) == 2  # 0 and 1 are running
        end_as_killed(first)
        second = storage()
        resumed = [second.claim(4) for _ in range(2)]
        assert [(each.number, each.is_resumed) for each in resumed if each is not None] == [
            (0, True),
            (1, True),
        ]
        last = second.claim(4)
        assert last is not None
        assert (last.number, last.is_resumed) == (3, False)

    def test_one_that_has_saved_and_ended_is_resumed(self, storage: Open) -> None:
        opened = storage()
        claimed = opened.claim(1)
        assert claimed is not None
        opened.end(claimed, TrialOutcome(state="running"))
        again = opened.claim(1)
        assert again is not None
        assert (again.number, again.is_resumed) == (0, True)

    def test_one_of_another_folder_is_left_to_that_folder(
        self, storage: Open, tmp_path: Path
    ) -> None:
        url = f"sqlite:///{tmp_path}/shared.db"
        there, here = storage("there", storage=url), storage("here", storage=url)
        assert number_of(there.claim(2)) == 0
        end_as_killed(there)
        assert [number_of(here.claim(2)) for _ in range(2)] == [1, None]
        assert number_of(storage("there", storage=url).claim(2)) == 0

    def test_one_that_another_folder_made_and_did_not_begin_is_begun_by_whoever_comes(
        self, storage: Open, tmp_path: Path
    ) -> None:
        url = f"sqlite:///{tmp_path}/shared.db"
        there, here = storage("there", storage=url), storage("here", storage=url)
        there.note_wanted(1)
        waiting = optuna.trial.create_trial(
            state=optuna.trial.TrialState.WAITING, user_attrs=there._attributes(0)
        )
        there.study.add_trial(waiting)
        claimed = here.claim(1)
        assert claimed is not None
        assert (claimed.number, claimed.is_resumed) == (0, False)
        assert of_number(here, 0).run_dir == str(tmp_path / "here" / "trial-0000")
        assert there.claim(1) is None  # it is the other's now
        assert not there.has_unfinished(1)
        assert here.has_unfinished(1)

    def test_its_folder_is_noted_before_it_runs(
        self, storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A search that is killed between the two leaves a trial that it resumes, and nobody
        else's."""
        url = f"sqlite:///{tmp_path}/shared.db"
        there, here = storage("there", storage=url), storage("here", storage=url)
        there.study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.WAITING, user_attrs=there._attributes(0)
            )
        )
        found: list[Any] = []

        def set_state(trial_id: int, state: Any, values: Any = None) -> bool:
            found.append(here.study._storage.get_trial(trial_id).user_attrs["folder"])
            return original(trial_id, state, values)

        original = here.study._storage.set_trial_state_values
        monkeypatch.setattr(here.study._storage, "set_trial_state_values", set_state)
        assert number_of(here.claim(1)) == 0
        assert found == [here._identity] != [there._identity]

    def test_those_beyond_the_wanted_ones_are_never_begun_and_not_shown(
        self, storage: Open
    ) -> None:
        opened = storage()
        for _ in range(3):
            opened.study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.WAITING))
        opened.note_wanted(2)
        assert [number_of(opened.claim(2)) for _ in range(3)] == [0, 1, None]
        assert len(opened.results().trials) == 2
        assert [trial.state.name for trial in opened.study.get_trials()] == [
            "RUNNING",
            "RUNNING",
            "WAITING",
        ]

    @pytest.mark.parametrize("folders", [["a"], ["a", "b"]], ids=["one folder", "two folders"])
    def test_searches_that_claim_at_once_never_get_the_same_trial(
        self, storage: Open, tmp_path: Path, folders: list[str]
    ) -> None:
        url = f"sqlite:///{tmp_path}/shared.db"
        opened = [storage(folder, storage=url) for folder in folders * (4 // len(folders))]
        assert claimed_at_once(opened, 24) == [(number, False) for number in range(24)]

    def test_a_process_that_is_killed_while_it_claims_leaves_its_trial_to_the_next(
        self, storage: Open, tmp_path: Path
    ) -> None:
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            mine = TrialStorage(request(tmp_path / "search"))
            os.write(writer, b"x" if number_of(mine.claim(2)) == 0 else b"-")
            threading.Event().wait()
        os.close(writer)
        assert os.read(reader, 1) == b"x"
        os.close(reader)
        assert number_of(storage().claim(2)) == 1
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        again = storage().claim(2)
        assert again is not None
        assert (again.number, again.is_resumed) == (0, True)


@pytest.fixture(scope="module")
def importance() -> None:
    """Import what sets environment variables for good."""
    importlib.import_module("optuna.importance")


class TestWhichSearchItIs:
    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"line": ScriptLine("other.py")}, "script: ['train.py'], now ['other.py']"),
            ({"metric": "validation/loss"}, "metric: 'loss', now 'validation/loss'"),
            ({"direction": "maximize"}, "direction: 'minimize', now 'maximize'"),
            ({"launch": LaunchOptions(set=("lr=1",))}, "set: [], now ['lr=1']"),
            ({"sampler": "pbt"}, "population: None, now '8 trials, 8 members'"),
        ],
    )
    def test_another_search_is_refused(
        self, storage: Open, tmp_path: Path, changes: Any, text: str
    ) -> None:
        make_trial(storage(), 1)
        with pytest.raises(RecipeError) as raised:
            storage(**changes)
        assert (
            str(raised.value)
            == f"the search 'train' in sqlite:///{tmp_path}/search/search.db is a different search:"
            f" {text}; the trials of a search are compared with each other; give the values with"
            " which it was begun, or begin another (--run-dir, or --name)"
        )
        assert storage().claim(1) is None  # the first is as it was

    def test_a_population_has_as_many_generations_as_it_was_begun_with(self, storage: Open) -> None:
        """A generation is a part of the training: its trials end where they were to end."""
        storage(sampler="pbt", population=4).note_parameters(
            [each.describe() for each in PARAMETERS]
        )
        with pytest.raises(
            RecipeError,
            match="is a different search: population: '8 trials, 4 members', now '12 trials, 4 members'",
        ):
            storage(sampler="pbt", population=4, trials=12)

    def test_until_a_trial_has_told_its_parameters_a_mistake_can_be_corrected(
        self, storage: Open
    ) -> None:
        mistaken = storage(metric="losss")
        assert number_of(mistaken.claim(1)) == 0
        end_as_killed(mistaken)
        corrected = storage()
        assert make_trial(corrected, 1) is not None
        assert corrected.results().metric == "loss"

    def test_of_two_that_begin_at_once_and_are_not_alike_one_is_refused(
        self, storage: Open
    ) -> None:
        mistaken, other = storage(metric="losss"), storage()
        proposals(other)
        with pytest.raises(RecipeError, match="is a different search: metric: 'loss', now 'losss'"):
            mistaken.note_parameters([each.describe() for each in PARAMETERS])
        with pytest.raises(RecipeError, match="is a different search: metric: 'loss', now 'losss'"):
            proposals(mistaken)

    def test_a_folder_holds_one_search(self, storage: Open, tmp_path: Path) -> None:
        storage()
        for changes in ({"name": "other"}, {"storage": f"sqlite:///{tmp_path}/other.db"}):
            with pytest.raises(LaunchError) as raised:
                storage(**changes)
            assert (
                str(raised.value)
                == f"--run-dir {tmp_path}/search holds the search 'train' in its own SQLite file; a"
                " folder holds one search; give its --name and --storage, or another folder"
            )
        assert not (tmp_path / "other.db").exists()

    def test_two_that_make_a_folder_at_once_are_one_search(
        self, storage: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        first = storage()
        found = [
            json.loads((tmp_path / "search" / "search.json").read_text())["identity"],
            first._identity,
        ]
        (tmp_path / "search" / "search.json").unlink()
        threads_found: list[str] = []
        threads = [
            threading.Thread(target=lambda: threads_found.append(storage()._identity))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1
        assert len(set(threads_found)) == 1

    def test_a_folder_that_nothing_has_begun_in_has_no_report(
        self, tmp_path: Path, storage: Open
    ) -> None:
        opened = storage()
        opened.study._storage.set_study_user_attr(opened.study._study_id, "search", {})
        (tmp_path / "search" / "search.json").write_text("{")
        with pytest.raises(LaunchError, match=re.escape("search.json is damaged: ")):
            study_of(tmp_path / "search")
        (tmp_path / "search" / "search.json").write_text(
            json.dumps({"storage": None, "name": "gone"})
        )
        with pytest.raises(
            LaunchError,
            match=(
                r"search\.db does not have that search; it may be another file or database; give"
                r" the one in which the search was made"
            ),
        ):
            study_of(tmp_path / "search")


def test_parameters_that_another_search_tells_at_any_moment_are_sampled(storage: Open) -> None:
    """Not even a look in vain, just before, makes a trial begin with the defaults."""
    here, there = storage(), storage()
    mine = Proposals(here._request, here)
    assert number_of(here.claim(2)) == 0
    assert not mine.are_known
    claimed = here.claim(2)
    assert claimed is not None
    proposals(there)
    assert set(mine.values(claimed)) == {"lr", "width", "layers"}
    assert mine.values(claimed)["lr"] != 0.1


class TestReports:
    def test_a_metric_is_noted_once_a_step_and_may_prune(self, storage: Open) -> None:
        opened = storage(pruner="median")
        for _ in range(6):
            claimed = opened.claim(9)
            assert claimed is not None
            proposals(opened)
            assert opened.report(claimed, 5, 1.0) is False
            opened.end(claimed, TrialOutcome(state="complete", value=1.0))
        claimed = opened.claim(9)
        assert claimed is not None
        assert opened.report(claimed, 5, 9.0) is True
        assert opened.report(claimed, 5, 7.0) is True  # after a resume: it is noted already
        opened.note_wanted(9)
        opened.end(claimed, TrialOutcome(state="pruned", reason="bad"))
        trial = of_number(opened, 6)
        assert (trial.state, trial.value, dict(trial.values), trial.reason) == (
            "pruned",
            9.0,
            {5: 9.0},
            "bad",
        )

    def test_the_loss_of_a_training_without_evaluations_is_noted_at_its_last_step(
        self, storage: Open
    ) -> None:
        opened = storage()
        claimed = opened.claim(1)
        assert claimed is not None
        proposals(opened)
        opened.note_wanted(1)
        opened.end(claimed, TrialOutcome(state="complete", value=0.5, steps=40))
        trial = of_number(opened, 0)
        assert (trial.value, trial.steps, dict(trial.values)) == (0.5, 40, {40: 0.5})

    def test_its_seconds_are_those_for_which_it_ran(self, storage: Open) -> None:
        opened = storage()
        claimed = opened.claim(1)
        assert claimed is not None
        opened.note_wanted(1)
        opened.note_seconds(claimed, 20.0)
        assert of_number(opened, 0).seconds is None
        opened.note_seconds(claimed, 10.0)
        opened.end(claimed, TrialOutcome(state="complete", value=0.5))
        assert of_number(opened, 0).seconds == 30.0

    def test_fewer_trials_than_there_are_hide_none(self, storage: Open) -> None:
        opened = storage()
        for _ in range(3):
            make_trial(opened, 3)
        for wanted in (2, 3, 2):
            opened.note_wanted(wanted)
            assert (len(opened.results().trials), opened.results().wanted) == (3, 3)

    def test_results_are_read_back_with_what_was_searched(
        self, importance: None, storage: Open, tmp_path: Path
    ) -> None:
        opened = storage()
        made = [make_trial(opened, 8) for _ in range(8)]
        opened.note_wanted(8)
        results = results_of(study_of(tmp_path / "search"))
        assert [(trial.number, trial.parameters) for trial in results.trials] == made
        assert list(results.parameters) == list(PARAMETERS)
        assert results.best == min(results.trials, key=lambda trial: trial.value or 0)
        assert set(importance_of(opened.study)) == {"lr", "width", "layers"}


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (
            "search.db",
            (
                "--storage 'search.db'; it must be the URL of a database: sqlite:///search.db,"
                " postgresql://user@host/name or mysql://"
            ),
        ),
        (
            "oops://a/b",
            (
                "--storage 'oops://a/b'; it must be the URL of a database: sqlite:///search.db,"
                " postgresql://user@host/name or mysql://"
            ),
        ),
        ("", "--storage ''; it must be the URL of a database"),
        (
            "postgresql+pg8000://u@h/x",
            (
                "--storage postgresql+pg8000://u@h/x needs the module pg8000; install it: pip"
                " install pg8000"
            ),
        ),
        (
            "sqlite:////proc/none/s.db",
            (
                "--storage sqlite:////proc/none/s.db cannot be reached: No such file or directory:"
                " /proc/none/s.db.lock; "
            ),
        ),
        (
            "postgresql+psycopg2://u@127.0.0.1:1/x",
            (
                "--storage postgresql+psycopg2://u@127.0.0.1:1/x cannot be reached: connection to"
                ' server at "127.0.0.1", port 1 failed: Connection refused; correct the address, or'
                " start the database; the same command continues"
            ),
        ),
    ],
)
def test_a_storage_that_cannot_be_had_is_one_message_and_can_be_corrected(
    storage: Open, url: str, text: str
) -> None:
    with pytest.raises(LaunchError, match=f"^{re.escape(text)}"):
        storage(storage=url)
    assert number_of(storage().claim(1)) == 0


def test_a_storage_in_a_folder_that_is_not_there_makes_none(storage: Open, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be reached: No such file or directory"):
        storage(storage=f"sqlite:///{tmp_path}/none/s.db")
    assert not (tmp_path / "none").exists()


def test_a_folder_whose_storage_has_lost_the_search_is_refused(
    storage: Open, tmp_path: Path
) -> None:
    make_trial(storage(), 1)
    for path in (tmp_path / "search").glob("search.db*"):
        path.unlink()
    for _ in range(2):
        with pytest.raises(
            LaunchError,
            match=(
                r"^--run-dir .*search has the trials of a search, but the study is missing from"
                r" .*search\.db; restore that storage"
            ),
        ):
            storage()


def test_the_folder_of_a_run_is_refused(storage: Open, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    with pytest.raises(
        LaunchError,
        match=r"^--run-dir .*run holds a run; a search needs its own folder; give another one$",
    ):
        storage("run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


def test_a_folder_that_cannot_be_made_is_one_message(storage: Open, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        LaunchError,
        match=(
            r"^--run-dir .*file cannot be made: Not a directory; a search writes to it; give a"
            r" folder"
        ),
    ):
        storage("file")


def test_a_file_that_is_no_database_is_refused(storage: Open, tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database" * 100)
    with pytest.raises(
        LaunchError,
        match=r"text\.db cannot be reached: file is not a database; correct the address",
    ):
        storage(storage=f"sqlite:///{tmp_path}/text.db")
