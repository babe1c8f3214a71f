"""The script that a run directory names, and the workers that run it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import Popen

import pytest

from lockstep.base.errors import LaunchError
from lockstep.cli.run_script import script_of
from lockstep.launch.failures import Ending, FailureRecord, WorkerFailure
from lockstep.launch.worker_files import WorkerFiles, WorkerStart
from lockstep.options import LaunchOptions
from lockstep.scripts.launch import launch_script
from lockstep.scripts.line import ScriptLine

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


def test_an_interrupt_of_a_worker_that_is_being_imported_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("print('it has begun')")
    files = WorkerFiles(tmp_path / "rank-0")

    def run_workers(start: Callable[[Mapping[str, str]], Popen[bytes]], **_: object) -> Ending:
        told = WorkerStart(launcher=os.getpid(), files=str(files.stem)).variables()
        worker = start({"LOCAL_RANK": "0", **told})
        worker.send_signal(signal.SIGINT)
        return Ending(failures=[WorkerFailure(rank=0, time=0.0, returncode=worker.wait())])

    monkeypatch.setattr("lockstep.launch.run_workers.run_workers", run_workers)
    line = ScriptLine(str(tmp_path / "train.py"))
    assert launch_script(line, LaunchOptions(), count=1, began=0.0) == 130
    record = FailureRecord.read(files.failure)
    assert record is not None
    assert record.kind == "builtins:KeyboardInterrupt", "it has arrived in the script"
    assert "Traceback" not in capfd.readouterr().err
