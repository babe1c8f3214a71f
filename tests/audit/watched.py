"""Runs a script in a process with the probes, and reads the record that they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import run_files
from processes import ran

from lockstep.audit.request import AuditRequest
from lockstep.audit.runner import SITE
from lockstep.evidence.rows import Row

SCRIPTS = Path(__file__).parent / "watched_scripts"


@dataclass(frozen=True, slots=True)
class Watched:
    """A script that has ended, and the records of its processes."""

    path: Path
    status: int
    output: str
    errors: str
    processes: list[list[Row]]
    """That of the script itself first."""

    def rows(self, kind: str, at: str = "") -> list[Row]:
        """The script's rows of a kind, from the line that has the comment `at`."""
        return [
            row
            for row in self.processes[0]
            if row["kind"] == kind and (not at or row["line"] == self.line(at))
        ]

    def line(self, mark: str) -> str:
        """The one line of the script that ends with `# mark`, or follows it, as the probes write
        it."""
        numbers = [
            number + line.lstrip().startswith("#")
            for number, line in enumerate(self.path.read_text().splitlines(), 1)
            if line.endswith(f"# {mark}")
        ]
        assert len(numbers) == 1, mark
        return f"{self.path}:{numbers[0]}"

    def step(self, at: str) -> Row:
        (row,) = self.rows("step", at)
        return row

    @property
    def printed(self) -> dict[str, Any]:
        """The JSON that the script has printed last."""
        found: dict[str, Any] = json.loads(self.output.splitlines()[-1])
        return found


def watch(name: str, folder: Path, *, steps: int = 1000, path: str = "", **environ: str) -> Watched:
    """Run a script of `watched_scripts`. `path`: more of PYTHONPATH."""
    script = SCRIPTS / name
    request = AuditRequest(folder=folder, steps=steps, roots=(str(SCRIPTS),))
    places = os.pathsep.join(filter(None, [str(SITE), path]))
    done = run(script, folder, {**request.write(folder), "PYTHONPATH": places, **environ})
    return Watched(script, done.returncode, done.stdout, done.stderr, _records(folder))


def watched(name: str, folder: Path, *, path: str = "") -> Watched:
    """Run a script that ends by itself, with status 0."""
    found = watch(name, folder, path=path)
    assert found.status == 0, found.errors
    return found


def problems(found: Watched) -> list[str]:
    return [row["text"] for rows in found.processes for row in rows if row["kind"] == "problem"]


def added(row: Row) -> list[float]:
    """The projections of what all backwards added to the first parameter."""
    total: list[float] = np.sum(
        [each[next(iter(row["applied"]))][:-1] for each in row["added"].values()], axis=0
    ).tolist()
    return total


def applied(row: Row) -> list[float]:
    found: list[float] = next(iter(row["applied"].values()))[:-1]
    return found


def run(script: Path, folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    places = {"FOLDER": str(folder), "TMPDIR": str(folder)}  # loader workers leave a folder there
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **places, **environ}
    command = [sys.executable, str(script)]
    return ran(command, env=environment, timeout=170, cwd=folder)


def _records(folder: Path) -> list[list[Row]]:
    found = [run_files.rows(path) for path in folder.glob("process-*.jsonl")]
    parents = {rows[0]["pid"] for rows in found}
    return sorted(found, key=lambda rows: (rows[0]["parent"] in parents, rows[0]["pid"]))
