"""A command that is a fork of the tests' process runs as one that was started."""

from __future__ import annotations

import subprocess
import sys
import weakref
from multiprocessing import resource_tracker
from pathlib import Path

import forked

LOCKS = """
import multiprocessing

with multiprocessing.get_context("spawn").Lock():
    print("locked")
"""


FINALIZES = """
import sys
import weakref

weakref.finalize(sys, print, "the script's")
"""

RAISES_IN_A_THREAD = """
import threading

threading.Thread(target=lambda: 1 / 0).start()
"""


def ran(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    line = [sys.executable, "script.py"]
    with forked.use():
        return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


def test_a_fork_has_a_resource_tracker_of_its_own(tmp_path: Path) -> None:
    resource_tracker.ensure_running()
    ended = ran(tmp_path, LOCKS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "locked\n", "")


def test_a_fork_calls_its_own_finalizers_at_its_end(tmp_path: Path) -> None:
    parents = weakref.finalize(sys, print, "the test's")
    assert ran(tmp_path, FINALIZES).stdout == "the script's\n"
    parents.detach()


def test_a_fork_prints_what_its_threads_raise(tmp_path: Path) -> None:
    assert "ZeroDivisionError" in ran(tmp_path, RAISES_IN_A_THREAD).stderr
