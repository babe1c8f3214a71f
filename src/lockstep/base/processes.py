"""Starts lockstep's processes, finds and kills descendant processes, and ends a process with its
parent."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from lockstep.base.temporary_folder import hold_folder

_POLL_SECONDS = 0.02


def parents() -> dict[int, int]:
    """Return the parent's id of each running process, by process id. Omits zombies."""
    if sys.platform != "linux":
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=False
        ).stdout
        rows = [line.split() for line in listed.splitlines()]
        return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}
    by_process = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):
                state, parent, *_ = (
                    Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
                )
                if state != b"Z":
                    by_process[int(entry)] = int(parent)
    return by_process


def descendants(roots: Collection[int]) -> set[int]:
    by_id = parents()
    processes = set(roots)
    while more := {pid for pid, parent in by_id.items() if parent in processes} - processes:
        processes |= more
    return (processes & by_id.keys()) - set(roots) - {os.getpid()}


def with_marker(*markers: str) -> set[int]:
    """Return the ids of processes whose environment has one of the entries "NAME=value", and of
    their descendants. Also finds orphaned processes. Linux only."""
    if sys.platform != "linux" or not markers:
        return set()
    wanted = set(map(os.fsencode, markers))
    marked = {pid for pid in parents() if not wanted.isdisjoint(_environment(pid))} - {os.getpid()}
    return marked | descendants(marked)


def _environment(pid: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def kill_all(find: Callable[[], set[int]], seconds: float) -> dict[int, str]:
    """Kill processes until `find` returns none, for at most `seconds`. Returns the names of the
    killed processes, by id."""
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


def shell_status(returncode: int) -> int:
    """Return the exit status that a shell shows. The status is 128 + N for a process that signal N
    has killed."""
    return returncode if returncode >= 0 else 128 - returncode


def own_python(*arguments: str) -> list[str]:
    """Return the command line of a Python process that imports nothing from the working
    directory."""
    return [sys.executable, "-P", *arguments]


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCH_SECONDS = 0.1
_parent: int | None = None
_is_watched = False  # True once a thread waits for the parent's end
_folder: str | None = None


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. `parent` is the process id of the
    parent. Linux only."""
    global _parent
    _parent = parent
    if sys.platform == "linux":
        _signal_after_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def outlive_parent(
    seconds: float, busy_seconds: float, is_busy: Callable[[], bool], may_go_on: Callable[[], bool]
) -> None:
    """Send SIGTERM to this process when its parent ends, so that the process can save. Kills the
    process group `seconds` later, or `busy_seconds` later if `is_busy()`. Kills the process group
    at once if `may_go_on()` returns False. Linux only, in the main thread, after
    `die_with_parent`."""
    global _is_watched
    if _parent is None or sys.platform != "linux":
        return
    if not _is_watched:
        try:
            descriptor = os.pidfd_open(_parent)
        except OSError:  # the parent has ended, or the kernel is older than 5.3
            return
        _is_watched = True
        threading.Thread(
            target=_end_after_parent,
            args=(descriptor, seconds, busy_seconds, is_busy, may_go_on),
            name="lockstep-parent",
            daemon=True,
        ).start()
    _signal_after_parent(0)


def end_with_parent_again() -> None:
    """Undo `outlive_parent`. If the parent has already ended, the time limit of `outlive_parent`
    still applies."""
    if _is_watched:
        _signal_after_parent(signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _signal_after_parent(number: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _end_after_parent(
    parent: int,
    seconds: float,
    busy_seconds: float,
    is_busy: Callable[[], bool],
    may_go_on: Callable[[], bool],
) -> None:
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    is_asked = may_go_on()
    if is_asked:
        os.kill(os.getpid(), signal.SIGTERM)
    ended = time.monotonic()
    while is_asked and time.monotonic() - ended < (
        max(seconds, busy_seconds) if is_busy() else seconds
    ):
        time.sleep(_WATCH_SECONDS)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def use_parents_folder(folder: Path) -> None:
    """Put this process's temporary files into `folder`, which the parent process removes."""
    global _folder
    _folder = str(folder)
    hold_folder(folder.parent)


def temporary_folder(most_bytes: int) -> str:
    """Return the parent's folder for temporary files. Returns the system's folder if the path is
    longer than `most_bytes` bytes."""
    if _folder is not None and len(os.fsencode(_folder)) <= most_bytes and os.path.isdir(_folder):
        return _folder
    return tempfile.gettempdir()
