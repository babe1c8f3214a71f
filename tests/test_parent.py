"""A process that ends with its parent also ends if the parent was gone before it could ask for
that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.base.processes import die_with_parent
from lockstep.data import workers
from lockstep.launch import worker
from lockstep.launch.worker_files import WorkerStart


def begin_launched_worker(parent: int) -> None:
    os.environ.update(WorkerStart(launcher=parent).variables())
    worker.begin()


def begin_loader_worker(parent: int) -> None:
    workers._set_up_worker("", parent, 0)


@pytest.mark.parametrize("begin", [die_with_parent, begin_launched_worker, begin_loader_worker])
def test_a_process_whose_parent_has_ended_before_it_asks_to_end_with_it_ends(
    begin: Callable[[int], None],
) -> None:
    reader, writer = os.pipe()
    if (parent := os.fork()) == 0:
        own = os.getpid()
        if os.fork() == 0:
            try:
                while os.getppid() == own:
                    time.sleep(0.001)
                os.write(writer, b"began;")
                begin(own)
                os.write(writer, b"lives on")
            finally:
                os._exit(0)
        os._exit(0)
    os.close(writer)
    os.waitpid(parent, 0)
    with open(reader, "rb") as said:
        assert said.read() == b"began;"


def test_a_process_whose_parent_lives_goes_on() -> None:
    if (child := os.fork()) == 0:
        try:
            die_with_parent(os.getppid())
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


OUTLIVES = """
import os, signal, sys, time
from lockstep.base.processes import die_with_parent, outlive_parent
os.setsid()
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked;"))
die_with_parent(os.getppid())
outlive_parent(0.3, 30.0, lambda: os.path.exists("busy"), lambda: not os.path.exists("others"))
os.write(1, b"ready;")
while True: signal.pause()
"""


LAUNCHES = (
    "import subprocess, sys, threading, time\n"
    "for _ in range(4): threading.Thread(target=time.sleep, args=[60], daemon=True).start()\n"
    f"subprocess.Popen([sys.executable, '-c', {OUTLIVES!r}])\n"
    "time.sleep(60)"
)


def test_one_that_is_not_alone_is_killed_at_once(tmp_path: Path) -> None:
    (tmp_path / "others").touch()
    (tmp_path / "busy").touch()
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHES], cwd=tmp_path, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert os.read(parent.stdout.fileno(), 6) == b"ready;"
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == b""


def test_one_that_may_save_is_asked_once_and_killed_later(tmp_path: Path) -> None:
    """The parent has several threads: the kernel would send a signal for the end of each."""
    (tmp_path / "busy").touch()
    line = [sys.executable, "-c", LAUNCHES]
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert os.read(parent.stdout.fileno(), 6) == b"ready;"
        parent.send_signal(signal.SIGKILL)
        assert os.read(parent.stdout.fileno(), 100) == b"asked;"
        time.sleep(0.6)
        (tmp_path / "busy").unlink()  # it is still there, because it was busy
        assert parent.stdout.read() == b"", "it was asked once, and has ended"
