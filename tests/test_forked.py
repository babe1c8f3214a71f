"""A command that is a fork of the tests' process runs as one that was started."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

import forked

LOCKS = """
import multiprocessing

with multiprocessing.get_context("spawn").Lock():
    print("locked")
"""


def test_a_fork_has_a_resource_tracker_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "locks.py"
    script.write_text(LOCKS)
    resource_tracker.ensure_running()
    with forked.use():
        ended = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False
        )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "locked\n", "")
