"""A launcher's folder goes with it; where it was killed, with the next launcher on the machine."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch import launcher_folder as module
from lockstep.launch.launcher_folder import launcher_folder

HOLD = """
import time
from lockstep.launch.launcher_folder import launcher_folder
with launcher_folder() as folder:
    (folder / "rank-0.record").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


def test_a_killed_launchers_folder_is_removed_and_a_live_ones_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "lockstep-of-somebody").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    launchers = [subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    folders = [Path(launcher.stdout.readline().strip()) for launcher in launchers if launcher.stdout is not None]
    launchers[0].send_signal(signal.SIGKILL)
    launchers[0].communicate()
    assert folders[0].exists()
    with launcher_folder() as mine:
        assert sorted(tmp_path.iterdir()) == sorted([folders[1], mine, tmp_path / "lockstep-of-somebody"])
    assert not mine.exists()
    launchers[1].kill()
    launchers[1].communicate()


def test_a_launcher_that_starts_at_the_same_moment_leaves_the_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lock = fcntl.flock

    def while_another_starts(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        module.remove_folders_of_dead_launchers(tmp_path)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", while_another_starts)
    with launcher_folder() as mine:
        assert mine.exists()
        assert fcntl.flock is lock, "another one has looked while this one started"
