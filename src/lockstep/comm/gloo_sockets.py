"""Shuts down the sockets of this process's Gloo process groups, or of its connection to a store. A
shutdown wakes the threads that wait for the sockets. Linux only.

On torch 2.13 and 2.15 neither `abort` nor `shutdown` of a Gloo group wakes a thread in a
collective, but the end of a connection does. Each Gloo group has a thread with a known name, which
sleeps in epoll. The kernel lists the sockets of an epoll in /proc/self.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from lockstep.base.torch_private import PrefixStore, Store, TCPStore, clone_store

T = TypeVar("T")
GLOO_THREAD = "gloo_tcp_loop"
_EPOLL_CALLS = frozenset({22, 232, 281, 441})
_FILE_IN_EPOLL = re.compile(r"^tfd:\s*(\d+).*\bino:([0-9a-f]+)", re.MULTILINE)
_PROCESS = Path("/proc/self")
# A running thread shows no system call, so it is read several times.
_LOOKS, _LOOK_SECONDS = 5, 0.001


def gloo_threads() -> list[str]:
    return [task for task in _entries("task") if _read(f"task/{task}/comm").strip() == GLOO_THREAD]


def shut_down_gloo_sockets() -> bool:
    """Close the connections of every Gloo group of this process, so that its collectives raise. Any
    thread may call this function. Returns False if some connections could not be found: call this
    function again."""
    waiting = gloo_threads()
    for attempt in range(_LOOKS):
        if attempt:
            time.sleep(_LOOK_SECONDS)
        waiting = [thread for thread in waiting if not _shut_down_those_of(thread)]
        if not waiting:
            return True
    return False


def with_own_connection(store: Store) -> tuple[Store, int | None]:
    """Clone the store with a new connection. Also returns the inode of the connection's socket, or
    None for a store without a `TCPStore`."""
    server = store
    while isinstance(server, PrefixStore):
        server = server.underlying_store
    if not isinstance(server, TCPStore):
        return store, None
    while True:
        before = _sockets()
        clone = clone_store(store)
        new = [
            inode
            for inode, number in _sockets().items()
            if inode not in before and _leads_to(number, inode, server.port)
        ]
        if len(new) == 1:
            return clone, new[0]
        # Another thread has just connected to the store.


def shut_down(inode: int) -> None:
    """Close the connection of the socket with this inode. Any thread may call this function."""
    number = _sockets().get(inode)
    if number is not None:
        _with_socket(number, inode, _end)


def _shut_down_those_of(thread: str) -> bool:
    epoll = _epoll_of(thread)
    if epoll is None:
        return not (_PROCESS / "task" / thread).exists()
    descriptors = _FILE_IN_EPOLL.findall(_read(f"fdinfo/{epoll}"))
    # if the group was freed meanwhile, the number may now belong to another file
    if _epoll_of(thread) != epoll:
        return False
    for number, inode in descriptors:
        _with_socket(int(number), int(inode, 16), _end)
    return True


def _epoll_of(thread: str) -> int | None:
    call = _read(f"task/{thread}/syscall").split()
    in_epoll = bool(call) and call[0].isdigit() and int(call[0]) in _EPOLL_CALLS
    return int(call[1], 16) if in_epoll else None


def _with_socket(number: int, inode: int, function: Callable[[socket.socket], T]) -> T | None:
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        descriptor = os.dup(number)
        opened.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):
            return None
        connection = opened.enter_context(socket.socket(fileno=os.dup(descriptor)))
        if connection.family in (socket.AF_INET, socket.AF_INET6) and not connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            return function(connection)
    return None


def _end(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def _leads_to(number: int, inode: int, port: int) -> bool:
    return bool(_with_socket(number, inode, lambda connection: connection.getpeername()[1] == port))


def _sockets() -> dict[int, int]:
    return {inode: number for inode, number in _descriptors() if inode}


def _descriptors() -> Iterator[tuple[int, int]]:
    for name in _entries("fd"):
        with contextlib.suppress(OSError):
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"{_PROCESS}/fd/{name}"))
            if match:
                yield int(match[1]), int(name)


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(_PROCESS / folder)
    except OSError:  # not Linux
        return []


def _read(path: str) -> str:
    try:
        return (_PROCESS / path).read_text()
    except OSError:
        return ""
