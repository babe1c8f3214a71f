"""Searches as whole commands, of scripts/searched.py."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import forked
import psutil
from processes import LOCKSTEP, ran, started

SCRIPT = Path(__file__).parent.parent / "scripts" / "searched.py"


@cache
def import_for_the_forks() -> None:
    """Import what each command of a search would import for itself: 0.5 s of CPU time."""
    import pygments.formatters.terminal256  # noqa: F401
    from optuna.storages import RDBStorage

    import lockstep.search.coordinator  # noqa: F401

    RDBStorage("sqlite://").remove_session()  # Alembic and the dialect are imported in its making


def environment(folder: Path) -> dict[str, str]:
    """Variables of a search, which keeps its temporary files in `folder`."""
    import_for_the_forks()
    (folder / "tmp").mkdir(exist_ok=True)
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
    }


def line_of(*words: object, script: Path = SCRIPT) -> list[str]:
    """The command, whose `words` after `--` are the script's. The sampler is random, whose values
    are those of the seed."""
    given = list(map(str, words))
    at = given.index("--") if "--" in given else len(given)
    options = ["--sampler", "random", "--run-dir", "s", *given[:at]]
    return [LOCKSTEP, "search", *options, str(script), *given[at + 1 :]]


def search(
    folder: Path, *words: object, script: Path = SCRIPT
) -> AbstractContextManager[subprocess.Popen[str]]:
    """Start a search in a folder."""
    return started(
        line_of(*words, script=script),
        cwd=folder,
        env=environment(folder),
        stderr=subprocess.PIPE,
        text=True,
    )


def searched(
    folder: Path, *words: object, script: Path = SCRIPT
) -> subprocess.CompletedProcess[str]:
    """Make a search in a folder, to its end."""
    with started(
        line_of(*words, script=script),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        said, complained = process.communicate()
    assert "Traceback" not in complained or process.returncode == 2, complained
    return subprocess.CompletedProcess(process.args, process.returncode, said, complained)


def lockstep(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run another command in a folder, to its end."""
    line = [LOCKSTEP, *map(str, words)]
    with forked.use():
        return ran(line, cwd=folder, env=environment(folder))


def reported(folder: Path, name: str = "s", *words: str) -> list[dict[str, Any]]:
    """The trials, as `lockstep report --json` has them."""
    found = lockstep(folder, "report", "--json", *words, name)
    assert found.returncode == 0, found.stderr
    trials: list[dict[str, Any]] = json.loads(found.stdout)["trials"]
    return trials


def events(folder: Path, number: int, name: str = "s") -> list[dict[str, Any]]:
    """The events of a trial."""
    text = (folder / name / f"trial-{number:04d}" / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def starts(folder: Path, number: int, name: str = "s") -> int:
    """How often a trial was started."""
    return sum(event["event"] == "run-started" for event in events(folder, number, name))


def results(trials: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must be the same whatever happened to a search."""
    return [
        (trial["number"], trial["state"], trial["parameters"], trial["value"]) for trial in trials
    ]


def left_of(folder: Path) -> list[str]:
    """Processes of searches in a folder, and their temporary files."""
    mine = str(folder / "tmp")
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid}: {' '.join(process.cmdline())}")
        except (psutil.Error, OSError):
            continue
    return found + [str(path) for path in (folder / "tmp").iterdir()]
