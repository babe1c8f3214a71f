"""What several modules of whole commands compare with, made once a session."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import run_files
from cli.agents import ENVIRONMENT, SCRIPT, Agents
from processes import LOCKSTEP


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of the run of scripts/elastic.py on one process, to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [LOCKSTEP, "run", "--run-dir", "run", SCRIPT, "0"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    found: str = run_files.fingerprint(folder / "run")
    return found


@pytest.fixture
def agent(tmp_path: Path, port: int) -> Iterator[Agents]:
    """Start `lockstep run` as it would be on one of several machines; ended at the end of the
    test."""
    started: list[subprocess.Popen[str]] = []

    def agent(
        *arguments: str, nnodes: str = "1:2", host: str = "127.0.0.1", before: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        options = [
            "--nproc",
            "1",
            "--nnodes",
            nnodes,
            "--rdzv",
            f"{host}:{port}",
            "--max-restarts",
            "3",
            "--run-dir",
            "run",
        ]
        line = [*before, LOCKSTEP, "run", *options, *(arguments or (SCRIPT, "0.3"))]
        with (tmp_path / f"output-{len(started)}").open("w") as output:
            # One that is killed leaves its folder of records.
            environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
            process = subprocess.Popen(
                line,
                cwd=tmp_path,
                env=environment,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
            )
        started.append(process)
        return process

    yield agent
    for process in started:
        with suppress(psutil.NoSuchProcess):
            left = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            psutil.wait_procs(left, timeout=10)  # they die with it
        assert process.stderr is not None
        if not process.stderr.closed:
            process.communicate()
