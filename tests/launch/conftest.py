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

from lockstep.launch.failure import Ending
from lockstep.launch.local import run_workers
from lockstep.options import RunOptions

Starter = Callable[..., Ending]


@pytest.fixture
def run(tmp_path: Path) -> Starter:
    """Run `source` in `count` workers; it finds the rank as `rank`."""

    def run(source: str, count: int = 2, max_restarts: int = 0, **given: Any) -> Ending:
        path = tmp_path / "script.py"
        path.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + dedent(source))

        def start(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
            line = [sys.executable, "-u", "-P", "-m", "lockstep.launch.worker", str(path)]
            return subprocess.Popen(line, cwd=tmp_path, env={**os.environ, **environment}, start_new_session=True)

        return run_workers(start, count=count, launcher="lockstep", options=RunOptions(**given), max_restarts=max_restarts)

    return run
