"""The store in which several machines meet; one machine's launcher hosts it."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lockstep.base.errors import LaunchError, say
from lockstep.launch.machines import Machines, interface_of

JOIN_SECONDS = 600
"""Seconds that a machine waits for the others."""
NOTICE_SECONDS = 5
"""Seconds without an answer after which it prints that it is still trying."""
STORE_SILENCE_SECONDS = 10
"""Seconds without an answer of the rendezvous' machine after which it is lost for this one."""
STORE_SECONDS = 10
"""Timeout of one store request: the machine that should write the key may be lost."""


def store_on(listener: socket.socket) -> TCPStore:
    """A store on this socket. Without a socket, TCPStore would listen on all interfaces."""
    address, port = listener.getsockname()[:2]
    timeout = timedelta(seconds=STORE_SECONDS)
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def host_store(machines: Machines, address: str) -> TCPStore | None:
    """A store in this process; None if the address is not this machine's, or another process hosts
    the store."""
    try:
        return store_on(socket.create_server((address, machines.port), family=family(address)))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL and machines.node_rank == 0:
            raise LaunchError(
                f"{machines.option}: {address} is no address of this machine, whose number is 0;"
                " the others look for number 0 there; correct the address, or --node-rank"
            ) from None
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise LaunchError(
            f"{machines.option}: cannot listen there ({error.strerror}); it is a free port of one"
            " of the machines; give another"
        ) from None


def connect_store(machines: Machines, address: str, own: str) -> TCPStore:
    """A connection to the store that another machine hosts or will host. `own`: this machine's
    address."""
    began = time.monotonic()
    has_said = False
    while True:
        try:
            socket.create_connection((address, machines.port), timeout=5).close()
            return TCPStore(
                address, machines.port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS)
            )
        except OSError as error:
            waited = time.monotonic() - began
            tried = (
                f"tried {address} port {machines.port} from {own} on"
                f" {interface_of(own) or 'an interface without a name'}: {error}"
            )
            if waited > JOIN_SECONDS:
                raise LaunchError(
                    f"nobody at {machines.option} for {JOIN_SECONDS} s ({tried}); the same command"
                    " runs on that machine too, and keeps the rendezvous; start it there, or"
                    " correct the address, or let this machine reach that port"
                ) from None
            if waited > NOTICE_SECONDS and not has_said:
                say(
                    f"lockstep: no answer yet at {machines.option} ({tried}); goes on trying for"
                    f" {JOIN_SECONDS} s"
                )
                has_said = True
        time.sleep(0.5)


def set_tcp_timeouts(address: str, port: int) -> None:
    """Have the kernel close this process's connections to a silent host after
    STORE_SILENCE_SECONDS. Otherwise torch waits as long as the kernel tries, a quarter of an hour,
    and ignores signals.
    """
    if sys.platform != "linux":
        return
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 2,
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 2,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): STORE_SILENCE_SECONDS * 1000,
    }
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # not a connection, or closed by now
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as each:
                    peer = (
                        each.getpeername()
                        if each.family in (socket.AF_INET, socket.AF_INET6)
                        else ("", 0)
                    )
                    if (peer[0].removeprefix("::ffff:"), peer[1]) == (address, port):
                        for (level, option), value in options.items():
                            each.setsockopt(level, option, value)


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
