"""The request of an audit travels in environment variables, and ties processes to the audit that
asked for them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from processes import ran, started


def test_reading_a_request_does_not_import_torch() -> None:
    program = (
        "import sys, lockstep.audit.request, lockstep.audit.runner, lockstep.audit.page;"
        " print('torch' in sys.modules)"
    )
    assert ran([sys.executable, "-c", program], check=True).stdout == "False\n"


TIED = """
import os, subprocess, sys, time
from functools import partial
from pathlib import Path
from lockstep.base.processes import die_with_parent
from lockstep.audit.request import AuditRequest
depth = int(sys.argv[1])
if depth:
    AuditRequest.read(os.environ).die_with_launcher()
else:
    request = AuditRequest(folder=Path("."), steps=3, roots=("/a",), runner=os.getpid())
    os.environ.update(request.write(Path(".")))
open(f"pid-{depth}.new", "w").write(str(os.getpid()))
os.rename(f"pid-{depth}.new", f"pid-{depth}")
if depth < 3:
    tie = partial(die_with_parent, os.getpid()) if not depth else None
    line = [sys.executable, __file__, str(depth + 1)]
    subprocess.Popen(line, start_new_session=True, preexec_fn=tie)
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
    with started([sys.executable, str(tmp_path / "tied.py"), "0"], cwd=tmp_path) as audit:
        when((tmp_path / "pid-3").exists)
        processes = [
            psutil.Process(int((tmp_path / f"pid-{depth}").read_text())) for depth in range(4)
        ]
        try:
            audit.kill()
            _, alive = psutil.wait_procs(processes[1:3], timeout=60)
            assert not alive
            assert processes[3].status() != psutil.STATUS_ZOMBIE
        finally:
            os.kill(processes[3].pid, signal.SIGKILL)
