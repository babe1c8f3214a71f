"""The script that a run directory names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.base.errors import LaunchError
from lockstep.cli.run_script import script_of

WORKER = ["python", "-P", "-m", "lockstep.launch.worker"]


@pytest.mark.parametrize(
    ("line", "launcher", "message"),
    [
        (["python", "-c", "from multiprocessing.spawn import"], "spawn", "by ls.spawn, which"),
        (["python", "train.py"], "spawn", "a SCRIPT that calls the function itself"),
        (["python", "-m", "ipykernel_launcher", "-f", "a.json"], "none", "made in a notebook"),
    ],
)
def test_runs_that_no_script_makes_again_are_refused_by_name(
    tmp_path: Path, line: list[str], launcher: str, message: str
) -> None:
    metadata = {"launcher": launcher, "environment": {"command_line": line}}
    (tmp_path / "run.json").write_text(json.dumps(metadata))
    with pytest.raises(LaunchError, match=message):
        script_of(tmp_path, "runs/a", "a step is made again by the script")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["python", "train.py", "-m", "1"], ["train.py", "-m", "1"]),
        (["python", "-u", "-X", "dev", "-W", "ignore", "train.py"], ["train.py"]),
        (["python", "-u", "-m", "json.tool", "--lr", "1"], ["-m", "json.tool", "--lr", "1"]),
        ([*WORKER, "train.py", "-u"], ["train.py", "-u"]),
        ([*WORKER, "-m", "json.tool", "a"], ["-m", "json.tool", "a"]),
        (["python", "-c", "import this", "a"], None),
        (["python", "-"], None),
        (["python", "-m"], None),
        ([], None),
    ],
)
def test_the_script_is_found_behind_pythons_own_options(
    tmp_path: Path, line: list[str], words: list[str] | None
) -> None:
    (tmp_path / "train.py").write_text("")
    environment = {"command_line": line, "working_directory": str(tmp_path)}
    (tmp_path / "run.json").write_text(json.dumps({"environment": environment}))
    if words is None:
        with pytest.raises(LaunchError, match="runs/a does not name its script"):
            script_of(tmp_path, "runs/a", "a step is made again by the script")
        return
    found = script_of(tmp_path, "runs/a", "a step is made again by the script")
    assert [word.removeprefix(f"{tmp_path}/") for word in found.words] == words
