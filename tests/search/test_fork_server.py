"""The process that forks the launchers of a search, in the tests a fork of this one."""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from lockstep.search.fork_server import ForkServer, LaunchRequest


@pytest.mark.forks
def test_the_end_of_the_server_removes_what_a_killed_launcher_leaves(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    script = tmp_path / "train.py"
    script.write_text(f"import os, time\nos.mkdir({str(begun)!r})\ntime.sleep(1000)\n")
    before = set(Path(tempfile.gettempdir()).glob("lockstep-*"))
    server = ForkServer()
    try:
        server.gpus()
        request = LaunchRequest(
            number=0,
            folder=str(tmp_path),
            line=[str(script)],
            processes=1,
            max_restarts=0,
            options={},
            request={"answered_by": "lockstep.search.trial_hook", "calls": ""},
            environment={},
        )
        server.start(request).close()
        while not begun.exists():
            time.sleep(0.01)
        (launcher,) = psutil.Process(server._process.pid).children()
        launcher.kill()
        ended = server.channel.receive()
    finally:
        server.close()
    assert ended is not None
    assert ended["status"] == -signal.SIGKILL
    assert set(Path(tempfile.gettempdir()).glob("lockstep-*")) == before
