"""Look at this machine, start the ranks, and put together what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.doctor import directory, environment, facts, machine
from lockstep.doctor.findings import lines_of_results
from lockstep.doctor.line import Line, Verdict, worst
from lockstep.launch.agent import run_workers
from lockstep.launch.failures import Ending
from lockstep.launch.machines import Machines
from lockstep.options import RunOptions

DEADLINE_SECONDS = 20.0
"""For each probe."""
WORKER = ("-P", "-m", "lockstep.doctor")
"""What Python is started with for each rank; a test may give a script that breaks something first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """What the doctor found."""

    lines: list[Line]
    results: Mapping[str, Any]
    """Of the ranks, as `lockstep.doctor.worker` writes them: `world_size`, `backend`, `checked`, `timed`, `links`, ..."""
    ending: Ending
    """Of the workers of this machine."""

    @property
    def verdict(self) -> Verdict:
        return worst(self.lines)

    @property
    def is_first(self) -> bool:
        """Whether this machine is the first of several, which shows the report."""
        return int(self.results.get("machine", 0)) == 0

    @property
    def status(self) -> int:
        """Exit status."""
        return 0 if self.verdict == "ok" else 1


def examine(
    *,
    nproc: int,
    machines: Machines | None = None,
    run_dir: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    worker: Sequence[str] = WORKER,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Examination:
    """Examine this machine with `nproc` ranks, or several together, each of which calls this. `run_dir=None`: the working directory.

    Raises `LaunchError` where the machines cannot meet.
    """
    least = nproc * (machines.least if machines is not None else 1)
    seen = facts.read(machines, environ)
    mine = [
        *machine.lines_of(seen, environ, nproc=nproc, world_size=least),
        *environment.lines_of(environ, nproc=nproc),
        *_directory(directory.existing(run_dir if run_dir is not None else Path())),
    ]
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as name:
        folder = Path(name)
        path = str(directory.existing(run_dir)) if run_dir is not None else None
        about = {"facts": asdict(seen), "lines": [asdict(line) for line in mine], "path": path}
        (folder / "machine.json").write_text(json.dumps(about), encoding="utf-8")

        def start(variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
            line = [sys.executable, *worker, name, str(deadline_seconds)]
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return subprocess.Popen(line, env={**environ, **variables}, stdout=sys.stderr, start_new_session=True)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        ending = run_workers(start, count=nproc, launcher="lockstep", options=RunOptions(), machines=machines, command="lockstep doctor")
        results = _results(folder)
    results.setdefault("machines", [about])
    return Examination(lines=lines_of_results(results, ending), results=results, ending=ending)


def _directory(path: Path) -> list[Line]:
    try:
        return directory.lines_of(directory.probe(path))
    except OSError as error:
        return directory.unusable(path, error)


def _results(folder: Path) -> dict[str, Any]:
    """Of the rank that knows most: all ranks that came to the end know the same."""
    found: list[dict[str, Any]] = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("results-*.json"))]
    return max(found, key=lambda values: (len(values.get("notes", ())), len(values)), default={})
