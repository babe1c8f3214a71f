"""The processes of an audited script: all that it has started, in whatever session, and their
end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from lockstep.base.descendants import descendants, kill_all, parents, with_marker
from lockstep.base.system import signals

STOP_SECONDS = 5.0
"""Seconds from asking the script to end to killing all of it."""
KILL_SECONDS = 10.0
"""Longest wait for killed processes."""


def end_all(root: subprocess.Popen[bytes], folder: Path, marker: str) -> None:
    """End the script and all that it has started. torchrun ends its workers when it is asked to;
    the rest is killed."""
    seen = started_by(root.pid, folder, marker)
    if root.poll() is None:
        _send(root.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            root.wait(STOP_SECONDS)
    kill_all(lambda: (started_by(root.pid, folder, marker) | seen) & parents().keys(), KILL_SECONDS)
    with suppress(subprocess.TimeoutExpired):
        root.wait(KILL_SECONDS)


def started_by(root: int, folder: Path, marker: str) -> set[int]:
    """Return the ids of the script's processes that run: the descendants of `root`, and those that
    have lost their parent: on Linux by the entry `marker` of their environment, elsewhere by the
    names of the records in `folder`."""
    left = (
        with_marker(marker) if sys.platform == "linux" else set(recorded(folder)) & parents().keys()
    )
    return (left | {root} | descendants(left | {root})) & parents().keys() - {os.getpid()}


def recorded(folder: Path) -> dict[int, Path]:
    """Return the records of the processes, by process id."""
    found = {}
    for path in folder.glob("process-*.jsonl"):
        with suppress(ValueError):
            found[int(path.stem.removeprefix("process-"))] = path
    return found


def running_records(folder: Path) -> set[int]:
    """Return the ids of the processes that keep records and still run."""
    return recorded(folder).keys() & parents().keys()


def dump_stacks(folder: Path, seconds: float) -> dict[int, str]:
    """Have all processes that keep records write the stacks of their threads, and return them after
    `seconds`."""
    running = sorted(running_records(folder))
    for pid in running:
        for number in signals("SIGUSR2"):
            _send(pid, number)
    time.sleep(seconds)
    files = {pid: folder / f"stacks-{pid}.txt" for pid in running}
    return {
        pid: path.read_text(encoding="utf-8", errors="replace")
        for pid, path in files.items()
        if path.exists()
    }


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
