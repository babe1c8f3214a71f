"""`lockstep search` as a whole command: what becomes of trials that fail, and of mistakes."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cli.searches import (
    SCRIPT,
    events,
    left_of,
    lockstep,
    reported,
    results,
    search,
    searched,
    starts,
)

pytestmark = [pytest.mark.timeout(150), pytest.mark.forks]
SEARCHED = ["lr", "width"]


def changed(folder: Path, text: str, to: str) -> Path:
    """The script, with something else in it."""
    script, before = folder / "searched.py", SCRIPT.read_text()
    assert text in before
    script.write_text(before.replace(text, to))
    return script


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The first 7 trials with seed 0, of which none fails."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = searched(folder, "--trials", 7, "--parallel", 2)
    assert found.returncode == 0, found.stderr
    return reported(folder)


@pytest.mark.command
def test_every_rank_of_every_trial_has_its_values_one_of_thousands_of_choices_too(
    tmp_path: Path,
) -> None:
    files = 'choices=["0"] + [f"{i:050d}.tar" for i in range(1, 3000)]'
    script = changed(tmp_path, "trial =", f'ls.param("file", "0", {files})\ntrial =')
    words = ("--trials", 2, "--parallel", 1, "--plan", "replicate=3")
    found = searched(tmp_path, *words, script=script)
    assert found.returncode == 0, found.stderr
    trials = reported(tmp_path)
    for trial in trials:
        values = [trial["parameters"][name] for name in SEARCHED]
        folder = tmp_path / "s" / f"trial-{trial['number']:04d}"
        assert [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(3)] == [
            values
        ] * 3
        recipe = json.loads((folder / "run.json").read_text())["recipe"]
        assert recipe["parameters"] == trial["parameters"]
        assert trial["state"] == "complete"
    first, second = (trial["parameters"] for trial in trials)
    assert all(first[name] != second[name] for name in ("lr", "file"))


@pytest.mark.command
def test_a_parameter_on_one_rank_only_is_a_clear_error(tmp_path: Path) -> None:
    found = searched(
        tmp_path, "--trials", 5, "--parallel", 1, "--plan", "replicate=2", "--", "--trouble", "rank"
    )
    assert found.returncode == 2
    assert (
        "RecipeError: parameters.momentum is not there on rank 0 and 0.5 on rank 1; "
        in found.stderr.splitlines()[-1]
    )
    assert "Traceback" not in found.stderr


@pytest.mark.command
def test_values_that_differ_by_rank_are_a_clear_error(tmp_path: Path) -> None:
    other = 'width", 2 if os.environ["RANK"] == "0" else 4'
    script = changed(tmp_path, 'width", 2', other)
    found = lockstep(tmp_path, "run", "--nproc", 2, "--run-dir", "run", script)
    assert found.returncode == 2
    assert found.stderr.startswith(
        "lockstep: RecipeError: parameters.width is 2 on rank 0 and 4 on rank 1; "
    )
    assert "Traceback" not in found.stderr


FAILURES = {
    "crash": r"ValueError: lr 0\.\d+",
    "kill": "rank 0 was killed by SIGKILL",
    "memory": "MemoryError: ",
    "nan": "LossError: ",
    "hang": "HangError: ",
}


@pytest.mark.command
def test_a_trial_that_fails_is_that_trials_result(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    words = ("--trials", 7, "--parallel", 2, "--hang-after", "3s", "--", "--trouble")
    found = searched(tmp_path, *words, ",".join(FAILURES))
    assert found.returncode == 0, found.stderr
    first, *failed, last = reported(tmp_path)
    assert results([first, last]) == results([undisturbed[0], undisturbed[6]])
    for trial, reason in zip(failed, FAILURES.values(), strict=True):
        assert trial["state"] == "failed"
        assert re.match(reason, trial["reason"]), trial["reason"]
        assert f"trial {trial['number']} failed" in found.stderr
    assert not left_of(tmp_path)


@pytest.mark.command
def test_a_wrong_script_ends_the_search_after_three_failures_with_its_error(tmp_path: Path) -> None:
    found = searched(tmp_path, "--trials", 20, "--parallel", 1, "--", "--trouble", "syntax")
    assert found.returncode == 2
    assert "NameError: a name that is not there" in found.stderr.splitlines()[-1]
    assert "the script is at fault" in found.stderr.splitlines()[-1]
    assert "Traceback" not in found.stderr
    assert [trial["state"] for trial in reported(tmp_path)] == ["failed"] * 3
    assert (
        "NameError: a name that is not there"
        in (tmp_path / "s" / "trial-0002" / "output.txt").read_text()
    )


@pytest.mark.command
def test_a_mistake_in_a_value_ends_the_search_at_once_and_corrected_it_begins_with_the_defaults(
    tmp_path: Path,
) -> None:
    found = searched(tmp_path, "--trials", 2, "--set", "width=33")
    assert (found.returncode, found.stderr.count("\n")) == (2, 2), found.stderr
    assert found.stderr.splitlines()[-1].startswith(
        "lockstep: RecipeError: the parameter 'width' has the value '33' (--set); its choices are"
    )
    found = searched(tmp_path, "--trials", 1, "--set", "width=4")
    assert found.returncode == 0, found.stderr
    (trial,) = reported(tmp_path)
    assert (trial["state"], trial["parameters"]) == ("complete", {"lr": 0.1, "width": 4})


@pytest.mark.command
def test_a_mistake_in_the_metric_says_what_there_is_and_can_be_corrected(tmp_path: Path) -> None:
    found = searched(tmp_path, "--trials", 1, "--metric", "los", "--mode", "min")
    assert (found.returncode, found.stderr.count("\n")) == (2, 2), found.stderr
    last = found.stderr.splitlines()[-1]
    assert "--metric los" in last
    assert "loss" in last.replace("--metric los", "")
    found = searched(tmp_path, "--trials", 1, "--metric", "loss")
    assert found.returncode == 0, found.stderr
    assert [trial["state"] for trial in reported(tmp_path)] == ["complete"]


@pytest.mark.command
def test_a_script_or_a_space_that_was_edited_is_refused_until_the_change_is_taken_back(
    tmp_path: Path,
) -> None:
    assert searched(tmp_path, "--trials", 1, script=changed(tmp_path, "", "")).returncode == 0
    script = changed(tmp_path, "1, 2, 4]", "1, 2, 8]")
    script.write_text(script.read_text().replace("low=1e-3", "low=1e-4"))
    found = searched(tmp_path, "--trials", 2, script=script)
    assert found.returncode == 2
    assert (
        "the script's parameters differ from the search's: lr has low=0.0001, and had"
        " 0.001; width has choices=[1, 2, 8]" in found.stderr.splitlines()[-1]
    )
    changed(tmp_path, "y = x @", "y = 2 * x @")
    found = searched(tmp_path, "--trials", 2, "--plan", "replicate=2", script=script)
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1].endswith(
        "RecipeError: the script was edited since the search 'searched' began; the trials of a"
        " search are compared with each other; undo the change, or begin another search"
        " (--run-dir, or --name)"
    )
    assert [trial["state"] for trial in reported(tmp_path)] == ["complete", "running"]
    script.write_text(f"# Again.\n{SCRIPT.read_text()}")
    assert searched(tmp_path, "--trials", 2, script=script).returncode == 0
    assert [trial["state"] for trial in reported(tmp_path)] == ["complete"] * 2


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.command),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
    ids=lambda number: number.name,
)
def test_asked_to_end_its_trials_save_and_the_same_command_goes_on(
    tmp_path: Path, undisturbed: list[dict[str, Any]], number: signal.Signals
) -> None:
    words = ("--trials", 3, "--parallel", 2, "--", "--seconds", 0.1)
    with search(tmp_path, *words) as first:
        folders = [tmp_path / "s" / f"trial-{trial:04d}" / "checkpoints" for trial in (0, 1)]
        while not all(folder.is_dir() and any(folder.iterdir()) for folder in folders):
            assert first.poll() is None, first.communicate()
            time.sleep(0.02)
        first.send_signal(number)
        _, complained = first.communicate()
    assert first.returncode == 75, complained
    assert complained.endswith(f"lockstep: stopped by {number.name}; the same command continues\n")
    assert [trial["state"] for trial in reported(tmp_path)][:2] == ["running"] * 2
    second = searched(tmp_path, *words)
    assert second.returncode == 0, second.stderr
    assert results(reported(tmp_path)) == results(undisturbed[:3])
    for trial in (0, 1):
        told = {event["event"]: event["step"] for event in events(tmp_path, trial)}
        assert told["resumed"] == told["preempted"] >= 5
    assert [starts(tmp_path, trial) for trial in (0, 1)] == [2, 2]
    assert not left_of(tmp_path)


@pytest.mark.command
def test_when_its_time_is_over_the_trials_save_and_the_same_command_is_to_go_on(
    tmp_path: Path,
) -> None:
    found = searched(
        tmp_path, "--trials", 2, "--parallel", 2, "--timeout", "8s", "--", "--seconds", 2
    )
    assert found.returncode == 75, found.stderr
    assert "lockstep: the time of the search is over; its trials save and end\n" in found.stderr
    assert found.stderr.endswith("lockstep: stopped by --timeout; the same command continues\n")
    assert "complete" not in {trial["state"] for trial in reported(tmp_path)}
    assert not left_of(tmp_path)


@pytest.mark.command
def test_a_search_goes_on_to_more_trials_and_repeats_none(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    for trials, parallel in ((1, 2), (3, 1), (3, 2)):
        assert searched(tmp_path, "--trials", trials, "--parallel", parallel).returncode == 0
    assert results(reported(tmp_path)) == results(undisturbed[:3])
    assert [starts(tmp_path, number) for number in range(3)] == [1] * 3


@pytest.mark.command
def test_two_searches_of_one_folder_share_the_trials(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    (tmp_path / "met").mkdir()
    words = ("--trials", 4, "--parallel", 1, "--", "--meet", tmp_path / "met")
    with search(tmp_path, *words) as one, search(tmp_path, *words) as two:
        said = [each.communicate()[1] for each in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0], said
    assert results(reported(tmp_path)) == results(undisturbed[:4])
    assert [starts(tmp_path, number) for number in range(4)] == [1] * 4
    assert all("complete, loss" in each for each in said)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--trials", 2, "--storage", "s.db"],
            "LaunchError: --storage 's.db'; it must be the URL of a database: sqlite:///search.db, ",
        ),
        (
            ["--trials", 2, "--run-dir", "s3://b/x"],
            "RunDirectoryError: --run-dir is 's3://b/x', a URL; a run directory is a folder of ",
        ),
        (
            ["--sampler", "tpe"],
            (
                "LaunchError: a search by tpe without --trials; only a grid ends by itself; give "
                "--trials 50, say"
            ),
        ),
        (
            ["--trials", 2, "--metric", "accuracy"],
            (
                "LaunchError: --metric accuracy without --mode; only for a loss is it known that"
                " less is "
            ),
        ),
        (
            ["--trials", 0],
            (
                "UsageError: Invalid value for '--trials': 0 is not in the range x>=1; see lockstep"
                " search --help"
            ),
        ),
        (
            ["--trials", 2, "--set", "lr"],
            "RecipeError: --set 'lr'; it must be a parameter's name and its value: --set lr=1e-3",
        ),
        (
            ["--trials", 2, "--storage", "postgresql+psycopg2://u:p@127.0.0.1:1/x"],
            (
                "LaunchError: --storage postgresql+psycopg2://u:***@127.0.0.1:1/x has a password in"
                " it, and every"
            ),
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
@pytest.mark.command
def test_a_users_mistake_is_one_message_and_status_2(
    tmp_path: Path, words: list[Any], error: str
) -> None:
    found = searched(tmp_path, *words)
    assert found.returncode == 2
    assert found.stderr.startswith(f"lockstep: {error}")
    assert found.stderr.count("\n") == 1
