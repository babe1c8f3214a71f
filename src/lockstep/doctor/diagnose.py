"""Check this machine, start the ranks, and combine their results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.base.python_process import own_python
from lockstep.base.temporary_folder import locked_folder
from lockstep.doctor import environment_variables, file_system
from lockstep.doctor.check_result import CheckResult, Verdict, worst
from lockstep.doctor.machine_checks import machine_checks
from lockstep.doctor.machine_info import read_machine_info
from lockstep.doctor.summary import summarize
from lockstep.launch.agent.run_workers import run_workers
from lockstep.launch.failures import Ending
from lockstep.launch.machines import Machines
from lockstep.options import RunOptions

DEADLINE_SECONDS = 20.0
WORKER = ("-m", "lockstep.doctor")
"""A test may give a script that plants a fault first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    checks: list[CheckResult]
    results: Mapping[str, Any]
    """See `lockstep.doctor.worker`."""
    ending: Ending

    @property
    def verdict(self) -> Verdict:
        return worst(self.checks)

    @property
    def is_first_machine(self) -> bool:
        """True on the machine that prints the report."""
        return int(self.results.get("machine", 0)) == 0

    @property
    def status(self) -> int:
        return 0 if self.verdict == "ok" else 1


def diagnose(
    *,
    nproc: int,
    machines: Machines | None = None,
    run_dir: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    worker: Sequence[str] = WORKER,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Diagnosis:
    """Check this machine with `nproc` ranks, or several machines, each of which calls this.
    `run_dir=None`: the working directory. Raises `LaunchError` if the machines cannot meet."""
    world_size = nproc * (machines.least if machines is not None else 1)
    info = read_machine_info(machines, environ)
    own = [
        *machine_checks(info, environ, nproc=nproc, world_size=world_size),
        *environment_variables.environment_checks(environ, nproc=nproc),
        *file_system.check_folder(file_system.existing(run_dir if run_dir is not None else Path())),
    ]
    with locked_folder("lockstep-doctor-") as folder:
        path = str(file_system.existing(run_dir)) if run_dir is not None else None
        machine = {"info": asdict(info), "checks": [asdict(check) for check in own], "path": path}
        (folder / "machine.json").write_text(json.dumps(machine), encoding="utf-8")

        def start(variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
            command = own_python(*worker, str(folder), str(deadline_seconds))
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return subprocess.Popen(
                    command, env={**environ, **variables}, stdout=sys.stderr, start_new_session=True
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        ending = run_workers(
            start,
            count=nproc,
            launcher="lockstep",
            options=RunOptions(),
            machines=machines,
            command="lockstep doctor",
        )
        results = _read_results(folder)
    results.setdefault("machines", [machine])
    return Diagnosis(checks=summarize(results, ending), results=results, ending=ending)


def _read_results(folder: Path) -> dict[str, Any]:
    """Return the most complete results of any rank."""
    found: list[dict[str, Any]] = [
        json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(folder.glob("results-*.json"))
    ]
    return max(found, key=lambda values: (len(values.get("statuses", ())), len(values)), default={})
