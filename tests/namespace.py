"""What the programs unshare and nsenter do, for a fork of this process."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence

_FLAGS = {
    "--mount": 0x00020000,
    "--cgroup": 0x02000000,
    "--uts": 0x04000000,
    "--ipc": 0x08000000,
    "--pid": 0x20000000,
}
_NEW_NETWORK = 0x40000000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def join_network(name: str) -> None:
    """Move this process to the network namespace that `ip netns` made."""
    with open(f"/run/netns/{name}") as file:
        _call("setns", file.fileno(), _NEW_NETWORK)


def leave(namespaces: Sequence[str]) -> None:
    """Give this process namespaces of its own. With `--pid`, go on as a fork whose process id is 1,
    as under `unshare --pid --fork --kill-child`."""
    _call("unshare", sum(_FLAGS[each] for each in namespaces))
    if "--pid" not in namespaces:
        return
    child = os.fork()
    if child:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
