"""`--set`, and the values of a run that is resumed or evaluated, in whole commands."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import run_files
from cli.searches import SCRIPT, environment, lockstep, reported, searched
from processes import LOCKSTEP, started

pytestmark = [pytest.mark.command, pytest.mark.forks, pytest.mark.timeout(120)]


def recorded(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())["recipe"]["parameters"]


def test_a_run_that_is_resumed_takes_up_its_values(tmp_path: Path) -> None:
    line = [
        LOCKSTEP,
        "run",
        "--set",
        "lr=0.5",
        "--set",
        "width=4",
        "--run-dir",
        "run",
        str(SCRIPT),
        "--seconds",
        "0.1",
    ]
    with started(line, cwd=tmp_path, env=environment(tmp_path)) as first:
        while not any((tmp_path / "run").glob("checkpoints/*")):
            assert first.poll() is None
            time.sleep(0.02)
        first.send_signal(signal.SIGTERM)
    assert first.returncode == 75
    again = lockstep(tmp_path, "run", "--run-dir", "run", SCRIPT)
    assert again.returncode == 0, again.stderr
    assert recorded(tmp_path / "run") == {"lr": 0.5, "width": 4}
    assert json.loads((tmp_path / "run" / "rank-0.json").read_text()) == [0.5, 4]
    whole = lockstep(
        tmp_path, "run", "--set", "lr=0.5", "--set", "width=4", "--run-dir", "whole", SCRIPT
    )
    assert whole.returncode == 0, whole.stderr
    found = [run_files.fingerprint(tmp_path / name) for name in ("run", "whole")]
    assert found[0] == found[1]


def test_resumed_with_another_value_it_is_refused(tmp_path: Path) -> None:
    assert (
        lockstep(
            tmp_path, "run", "--set", "lr=0.5", "--run-dir", "run", SCRIPT, "--steps", 10
        ).returncode
        == 0
    )
    found = lockstep(
        tmp_path, "run", "--set", "lr=0.25", "--run-dir", "run", "--allow-change", "steps", SCRIPT
    )
    assert found.returncode == 2
    assert "0.25" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--set", "lr"],
            (
                "lockstep: RecipeError: --set 'lr'; it must be a parameter's name and its value: --set"
                " lr=1e-3\n"
            ),
        ),
        (
            ["--set", "lr=fast"],
            (
                "lockstep: RecipeError: the parameter 'lr' has the value 'fast' (--set); it must be a"
                " number, like its default 0.1\n"
            ),
        ),
        (
            ["--set", "lr=7"],
            (
                "lockstep: RecipeError: the parameter 'lr' has the value 7.0 (--set); it must"
                " be a number from 0.001 to 1.0; change it, or the bounds\n"
            ),
        ),
        (
            ["--set", "width=3"],
            (
                "lockstep: RecipeError: the parameter 'width' has the value '3' (--set); its"
                " choices are 1, 2, 4\n"
            ),
        ),
        (
            ["--set", "wdith=4"],
            (
                "lockstep: RecipeError: --set wdith=... or a search names a parameter that the script"
                " has not declared before its recipe; it has declared lr, width; correct the"
                " name, or call ls.param unconditionally\n"
            ),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_value_that_cannot_be_is_one_message_and_status_2(
    tmp_path: Path, words: list[str], error: str
) -> None:
    found = lockstep(tmp_path, "run", "--nproc", 2, *words, "--run-dir", "run", SCRIPT)
    assert (found.returncode, found.stderr) == (2, error)


def test_a_trial_is_evaluated_with_its_own_values(tmp_path: Path) -> None:
    """Its model has another shape than that of the defaults."""
    assert searched(tmp_path, "--trials", 1, "--set", "width=4").returncode == 0
    (trial,) = reported(tmp_path)
    assert trial["parameters"]["width"] == 4
    for words in ((), (SCRIPT,)):
        found = lockstep(tmp_path, "evaluate", "--json", trial["run_dir"], *words)
        assert found.returncode == 0, found.stderr
        assert json.loads(found.stdout)["loss"] == pytest.approx(trial["value"])
    wrong = lockstep(tmp_path, "evaluate", "--set", "width=1", trial["run_dir"])
    assert wrong.returncode != 0


def test_a_sweep_makes_each_combination_once(tmp_path: Path) -> None:
    line = [
        "sweep",
        "--set",
        "lr=0.1,0.5",
        "--set",
        "width=1,4",
        "--run-dir",
        "s",
        "--json",
        "--csv",
        "table.csv",
        SCRIPT,
    ]
    found = lockstep(tmp_path, *line)
    assert found.returncode == 0, found.stderr
    trials = json.loads(found.stdout)["trials"]
    values = [
        {"lr": 0.1, "width": 1},
        {"lr": 0.1, "width": 4},
        {"lr": 0.5, "width": 1},
        {"lr": 0.5, "width": 4},
    ]
    assert [trial["parameters"] for trial in trials] == values
    assert [recorded(Path(trial["run_dir"])) for trial in trials] == values
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 5
    again = lockstep(tmp_path, *line)
    assert json.loads(again.stdout)["trials"] == trials
    refused = lockstep(tmp_path, "sweep", "--set", "lr=0.1,7", "--run-dir", "other", SCRIPT)
    assert [trial["state"] for trial in reported(tmp_path, "other")] == ["complete", "failed"]
    assert (
        "has the value 7.0 (--set); it must be a number from 0.001 to 1.0"
        in refused.stdout + refused.stderr
    )
