"""Leak detection for tests: compares two snapshots of the resources that this process holds.

before = take()
    ...
    assert remaining(before) == []

It works on Linux only, because it reads /proc and /dev/shm.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Kind = Literal[
    "process", "thread", "port", "descriptor", "environment", "shared-memory", "temporary-file"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
SHARED_MEMORY = Path("/dev/shm")
POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 0.2
# pytest rewrites its variable in each phase of a test.
VOLATILE_VARIABLES = frozenset({"PYTEST_CURRENT_TEST"})
# Processes that Python starts once for the life of the interpreter; they are no leaks.
INTERPRETER_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

# The state of a listening socket in /proc/net/tcp.
LISTENING = "0A"
# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP = 4, 20, 0x301
NLMSG_ERROR, NLMSG_DONE = 2, 3
NETLINK_HEADER = struct.Struct("=IH10x")
NETLINK_ERROR = struct.Struct("=16xi")
DIAG_REQUEST = struct.Struct("=IHHII4BI48x")
DIAG_SOCKET = struct.Struct("=20xH62xI")

Found = dict[Hashable, str]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The resources that this process held when `take` was called."""

    found: Mapping[Kind, Mapping[Hashable, str]]
    """The description of each resource, by kind and identity (such as a process id)."""


@dataclass(frozen=True, slots=True)
class Exempt:
    """Resources that snapshots leave out, because they outlive the code under test. An example is
    the processes of a `WorkerPool`."""

    processes: Collection[int] = ()
    """Process ids. Snapshots also leave out the descendants of these processes."""
    descriptors: Collection[int] = ()
    """Numbers of file descriptors of this process."""


def take(kinds: Collection[Kind] = KINDS, exempt: Exempt | None = None) -> Snapshot:
    """Take a snapshot of the resources that this process holds, of the given kinds.

    The kinds are descendant processes (including zombies), Python threads, TCP ports that this
    process or a descendant listens on, open file descriptors, environment variables and the working
    directory, and files in /dev/shm and in the temporary folder. Files of other programs are
    included unless the test session has a private temporary folder (`tempfile.gettempdir()`).
    """
    exempt = exempt or Exempt()
    family = _family(exempt) if ("process" in kinds or "port" in kinds) and _has_children() else {}
    readers: dict[Kind, Callable[[], Found]] = {
        "process": lambda: _processes(family),
        "thread": _threads,
        "port": lambda: _ports(family),
        "descriptor": lambda: _descriptors(exempt),
        "environment": _environment,
        "shared-memory": _shared_memory,
        "temporary-file": _temporary_files,
    }
    return Snapshot({kind: readers[kind]() for kind in kinds})


def compare(before: Snapshot, after: Snapshot) -> list[str]:
    """Return a sentence for each resource that only `after` contains, and for each removed
    environment variable."""
    leaks = []
    for kind, now in after.found.items():
        then = before.found.get(kind, {})
        leaks += [f"{kind}: {text}" for identity, text in now.items() if identity not in then]
    if "environment" in after.found:
        still = {name for name, _ in _variables(after)}
        leaks += [
            f"environment: {name} was removed"
            for name, _ in _variables(before)
            if name not in still
        ]
    return leaks


def remaining(
    before: Snapshot, exempt: Exempt | None = None, timeout_seconds: float = 3.0
) -> list[str]:
    """Return a sentence for each leak since `before`. Waits up to `timeout_seconds` for threads and
    processes to end. Collects garbage first, because a reference cycle may hold a file descriptor.
    Leaves out files in /dev/shm that unrelated processes map."""
    kinds = tuple(before.found)
    deadline = time.monotonic() + timeout_seconds

    def found() -> list[str]:
        after = take(kinds, exempt)
        new = {str(path) for path in after.found.get("shared-memory", {})} - {
            str(path) for path in before.found.get("shared-memory", {})
        }
        mapped_by_others = _mapped_by_others(new)
        return [
            leak
            for leak in compare(before, after)
            if leak.removeprefix("shared-memory: ") not in mapped_by_others
        ]

    leaks = found()
    pause = POLL_SECONDS
    while leaks:
        # again in each round: a thread that has ended meanwhile may leave a reference cycle
        gc.collect()
        leaks = found()
        if time.monotonic() >= deadline:
            break
        if leaks:
            time.sleep(pause)
            pause = min(1.5 * pause, MAX_POLL_SECONDS)
    return leaks


def _variables(snapshot: Snapshot) -> list[tuple[str, str]]:
    return [
        identity
        for identity in snapshot.found.get("environment", {})
        if isinstance(identity, tuple)
    ]


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    state: str
    started: int
    """Start time in clock ticks since boot. The start time distinguishes the process from a later
    process with the same id."""


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _family(exempt: Exempt) -> dict[int, _Process]:
    """Return the running descendants of this process, by process id. Omits exempt processes, and
    processes that Python starts, such as multiprocessing's resource tracker."""
    children = _children()
    family: dict[int, _Process] = {}
    waiting = children(os.getpid())
    while waiting:
        number = waiting.pop()
        if number in exempt.processes or any(
            name in _command(number) for name in INTERPRETER_PROCESSES
        ):
            continue
        if (process := _process(number)) is not None:
            family[number] = process
            waiting += children(number)
    return family


def _children() -> Callable[[int], list[int]]:
    if os.path.exists(f"/proc/self/task/{threading.get_native_id()}/children"):
        return _listed_children
    children: dict[int, list[int]] = {}
    for number in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        if (process := _process(number)) is not None:
            children.setdefault(process.parent, []).append(number)
    return lambda number: children.get(number, [])


def _listed_children(number: int) -> list[int]:
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{number}/task")
    except OSError:
        return children  # the process has ended
    # the main thread last, because it inherits the children of ended threads
    for thread in reversed(threads):
        with contextlib.suppress(OSError), open(f"/proc/{number}/task/{thread}/children") as file:
            children += map(int, file.read().split())
    return children


def _process(number: int) -> _Process | None:
    try:
        with open(f"/proc/{number}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None  # it has ended
    # from the last ")": the process name before it may contain any characters
    fields = text.rpartition(b")")[2].split()
    return _Process(parent=int(fields[1]), state=fields[0].decode(), started=int(fields[19]))


def _command(number: int) -> str:
    try:
        return (
            Path(f"/proc/{number}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
        )
    except OSError:
        return ""


def _processes(family: dict[int, _Process]) -> Found:
    return {
        (number, process.started): (
            f"{number} has ended and was not waited for"
            if process.state == "Z"
            else f"{number} ({process.state}): {_command(number)[:200]}"
        )
        for number, process in family.items()
    }


def _ports(family: dict[int, _Process]) -> Found:
    found: Found = {}
    for number, target in _targets(os.getpid()).items():
        if target.startswith("socket:") and (port := _listening_port(number)) is not None:
            found[(os.getpid(), target)] = f"{port} is listened on by this process"
    sockets = [
        (number, target)
        for number in family
        for target in _targets(number).values()
        if target.startswith("socket:")
    ]
    listening = _listening_inodes() if sockets else {}
    for number, target in sockets:
        if target in listening:
            found[(number, target)] = (
                f"{listening[target]} is listened on by process {number} ({_command(number)[:80]})"
            )
    return found


def _listening_port(descriptor: int) -> int | None:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                return int(copy.getsockname()[1])
    except OSError:
        pass  # the descriptor was closed after it was listed
    return None


def _listening_inodes() -> dict[str, int]:
    """Return the port of each listening socket, by the socket's name in /proc."""
    try:
        return _asked_listening()
    except OSError:  # a kernel without sock_diag, or a sandbox that forbids netlink
        return _read_listening()


def _asked_listening() -> dict[str, int]:
    """Ask the kernel for listening sockets by sock_diag, which takes 0.1 ms. Reading /proc/net/tcp
    takes 5 ms, because the kernel walks its whole table of connections."""
    listening: dict[str, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        for family in (socket.AF_INET, socket.AF_INET6):
            header = DIAG_REQUEST.size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 0, 0
            asked = family, socket.IPPROTO_TCP, 0, 0, 1 << int(LISTENING, 16)
            kernel.send(DIAG_REQUEST.pack(*header, *asked))
            for message in _messages(kernel):
                port, inode = DIAG_SOCKET.unpack_from(message)
                listening[f"socket:[{inode}]"] = socket.ntohs(port)
    return listening


def _messages(kernel: socket.socket) -> Iterator[bytes]:
    while True:
        packet = kernel.recv(1 << 16)
        while packet:
            size, kind = NETLINK_HEADER.unpack_from(packet)
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                raise OSError(-NETLINK_ERROR.unpack_from(packet)[0], "sock_diag refused")
            yield packet[:size]
            packet = packet[(size + 3) & ~3 :]


def _read_listening() -> dict[str, int]:
    listening: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if os.path.exists(table):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            listening.update(
                {
                    f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16)
                    for row in rows
                    if row[3] == LISTENING
                }
            )
    return listening


def _targets(number: int) -> dict[int, str]:
    targets = {}
    try:
        for name in os.listdir(f"/proc/{number}/fd"):
            # the descriptor of this listing itself, or one that was closed meanwhile
            with contextlib.suppress(OSError):
                targets[int(name)] = os.readlink(f"/proc/{number}/fd/{name}")
    except OSError:
        pass  # the process has ended
    return targets


def _threads() -> Found:
    return {
        (
            thread.ident,
            thread.name,
        ): f"{thread.name} ({'daemon, ' if thread.daemon else ''}{type(thread).__qualname__})"
        for thread in threading.enumerate()
    }


def _descriptors(exempt: Exempt) -> Found:
    excluded = {*exempt.descriptors, _tracker_descriptor()}
    return {
        (number, target): f"{number} -> {target}"
        for number, target in _targets(os.getpid()).items()
        if number not in excluded
    }


def _tracker_descriptor() -> int:
    from multiprocessing import resource_tracker

    number = getattr(resource_tracker._resource_tracker, "_fd", None)
    return number if isinstance(number, int) else -1


def _environment() -> Found:
    found: Found = {
        (name, value): f"{name}={value[:200]!r} was set"
        for name, value in os.environ.items()
        if name not in VOLATILE_VARIABLES
    }
    found[("working directory", os.getcwd())] = f"the working directory became {os.getcwd()}"
    return found


def _temporary_files() -> Found:
    folder = tempfile.gettempdir()
    return {entry.path: entry.path for entry in os.scandir(folder)}


def _shared_memory() -> Found:
    return (
        {entry.path: entry.path for entry in os.scandir(SHARED_MEMORY)}
        if SHARED_MEMORY.is_dir()
        else {}
    )


def _mapped_by_others(paths: Collection[str]) -> set[str]:
    """Return the paths that unrelated processes map. The function compares inodes, because a
    process maps a new semaphore under a temporary name."""
    files = {}
    for path in paths:
        with contextlib.suppress(OSError):  # the file was removed after it was listed
            file = os.stat(path)
            device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
            files[device, str(file.st_ino)] = path
    if not files:
        return set()
    mapped: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text(errors="replace").splitlines()
        except OSError:
            continue  # the process ended, or belongs to another user
        hits = {
            files[key] for line in lines if (key := tuple(line.split(maxsplit=5)[3:5])) in files
        }
        if hits and not _is_family(int(process.name)):
            mapped |= hits
    return mapped


def _is_family(number: int) -> bool:
    while number > 1:
        if number == os.getpid():
            return True
        process = _process(number)
        if process is None:
            return False
        number = process.parent
    return False
