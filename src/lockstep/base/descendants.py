"""The descendants of a process, in whatever session, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

_POLL_SECONDS = 0.02


def parents() -> dict[int, int]:
    """Return the parent of each running process, without zombies."""
    if sys.platform != "linux":
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=False
        ).stdout
        rows = [line.split() for line in listed.splitlines()]
        return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):
                state, parent, *_ = (
                    Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
                )
                if state != b"Z":
                    found[int(entry)] = int(parent)
    return found


def descendants(roots: Collection[int]) -> set[int]:
    """Return the running descendants of processes, without this one."""
    by_id = parents()
    found = set(roots)
    while more := {pid for pid, parent in by_id.items() if parent in found} - found:
        found |= more
    return (found & by_id.keys()) - set(roots) - {os.getpid()}


def with_marker(*markers: str) -> set[int]:
    """Return the processes whose environment has an entry "NAME=value" of `markers`, and their
    descendants: an orphan keeps it. Linux only."""
    if sys.platform != "linux" or not markers:
        return set()
    wanted = set(map(os.fsencode, markers))
    marked = {pid for pid in parents() if not wanted.isdisjoint(_environment(pid))} - {os.getpid()}
    return marked | descendants(marked)


def _environment(pid: int) -> list[bytes]:
    """Return another process's environment as it was started; empty if not allowed."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def kill_all(find: Callable[[], set[int]], seconds: float) -> dict[int, str]:
    """Kill what `find` returns until it returns nothing, for so many seconds at most. Returns the
    names."""
    killed: dict[int, str] = {}
    until = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < until:
        for pid in sorted(found):
            killed.setdefault(pid, _name(pid))
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return killed


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""
