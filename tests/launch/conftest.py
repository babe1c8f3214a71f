"""Workers of a script, without torch in them, so that each starts in 0.1 s."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from lockstep.launch.failures import Ending
from lockstep.launch.machines import Machines
from lockstep.launch.recovery.channel import inherited
from lockstep.launch.recovery.in_place import InPlace
from lockstep.launch.run_workers import run_workers
from lockstep.options import RunOptions

Starter = Callable[..., Ending]


@pytest.fixture
def no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare process imports torch."""
    monkeypatch.setattr(InPlace, "keep_spare", lambda *_: None)


@pytest.fixture
def run(tmp_path: Path) -> Starter:
    """Run `source` in `count` workers; it finds the rank as `rank`."""

    def run(
        source: str,
        count: int = 2,
        max_restarts: int = 0,
        recovery: str = "restart",
        machines: Machines | None = None,
        **given: Any,
    ) -> Ending:
        path = tmp_path / "script.py"
        path.write_text(
            "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + dedent(source)
        )

        def start(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
            line = [sys.executable, "-u", "-P", "-m", "lockstep.launch.worker", str(path)]
            variables = {**os.environ, **environment}
            return subprocess.Popen(
                line,
                cwd=tmp_path,
                env=variables,
                start_new_session=True,
                pass_fds=inherited(environment),
            )

        options = RunOptions(**given)
        return run_workers(
            start,
            count=count,
            launcher="lockstep",
            options=options,
            max_restarts=max_restarts,
            machines=machines,
            recovery=recovery,
        )

    return run
