"""The request of an audit travels in environment variables, and ties processes to the audit that
asked for them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from processes import started

from lockstep.audit.request import AuditRequest
from lockstep.base.errors import LaunchError

REQUEST = AuditRequest(
    folder=Path("/tmp/a folder"), steps=3, roots=["/home/me/with:colon", "/b"], runner=7
)


def test_what_is_asked_is_what_is_read() -> None:
    assert AuditRequest.read(REQUEST.variables()) == REQUEST
    assert AuditRequest.read({"PATH": "/bin"}) is None


def test_the_marker_is_an_entry_of_the_environment() -> None:
    assert REQUEST.marker in [f"{name}={value}" for name, value in REQUEST.variables().items()]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "LOCKSTEP_AUDIT_STEPS",
            "0",
            "LOCKSTEP_AUDIT_STEPS='0'; it is a whole number of at least 1; unset it",
        ),
        (
            "LOCKSTEP_AUDIT_RUNNER",
            "me",
            "LOCKSTEP_AUDIT_RUNNER='me'; it is a whole number of at least 0; unset it",
        ),
        (
            "LOCKSTEP_AUDIT_ROOTS",
            "/a",
            "LOCKSTEP_AUDIT_ROOTS='/a'; it is a JSON list of directories; unset it",
        ),
        (
            "LOCKSTEP_AUDIT_ROOTS",
            "[1]",
            "LOCKSTEP_AUDIT_ROOTS='[1]'; it is a JSON list of directories; unset it",
        ),
    ],
)
def test_an_invalid_value_is_named(name: str, value: str, text: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(text)):
        AuditRequest.read({**REQUEST.variables(), name: value})


def test_a_stray_variable_is_named() -> None:
    with pytest.raises(
        LaunchError, match="LOCKSTEP_AUDIT_STEPS=3 without LOCKSTEP_AUDIT; lockstep audit sets both"
    ):
        AuditRequest.read({"LOCKSTEP_AUDIT_STEPS": "3"})


def test_reading_a_request_does_not_import_torch() -> None:
    program = (
        "import sys, lockstep.audit.request, lockstep.audit.runner, lockstep.audit.page;"
        " print('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


TIED = """
import os, subprocess, sys, time
from lockstep.audit.request import AuditRequest
depth = int(sys.argv[1])
if depth:
    AuditRequest.read(os.environ).die_with_launcher(os.environ)
else:
    os.environ["LOCKSTEP_AUDIT_RUNNER"] = str(os.getpid())
open(f"pid-{depth}.new", "w").write(str(os.getpid()))
os.rename(f"pid-{depth}.new", f"pid-{depth}")
if depth < 3:
    subprocess.Popen([sys.executable, __file__, str(depth + 1)], start_new_session=True)
time.sleep(1000)
"""


def when(made: Callable[[], bool]) -> None:
    while not made():
        time.sleep(0.02)


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel of Linux ends a process with its parent"
)
def test_a_killed_audit_takes_the_launcher_and_the_ranks_with_it_and_not_what_ranks_start(
    tmp_path: Path,
) -> None:
    """The pids are of the audit, the launcher, a rank, and what the rank has started."""
    (tmp_path / "tied.py").write_text(TIED)
    environment = {**os.environ, **REQUEST.variables()}
    with started(
        [sys.executable, str(tmp_path / "tied.py"), "0"], cwd=tmp_path, env=environment
    ) as audit:
        when((tmp_path / "pid-3").exists)
        processes = [
            psutil.Process(int((tmp_path / f"pid-{depth}").read_text())) for depth in range(4)
        ]
        try:
            audit.kill()
            _, alive = psutil.wait_procs(processes[1:3], timeout=10)
            assert not alive
            assert processes[3].status() == psutil.STATUS_SLEEPING
        finally:
            os.kill(processes[3].pid, signal.SIGKILL)
