"""Functions that the tests of `ls.spawn` call in other processes, in a module that those can
import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any, NoReturn

from lockstep.base.errors import DataError, UserError

RANK = int(os.environ.get("RANK", "-1"))


class Refused(UserError):
    """An error whose arguments are not its text."""

    def __init__(self, value: str, *, rule: str) -> None:
        super().__init__(f"{value}; {rule}")


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def double(point: Point, queue: Any = None) -> Point:
    if queue is not None:
        queue.put(rank())
    return Point(2 * point.x if rank() == 0 else -1)


def describe_process() -> dict[str, Any]:
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCKSTEP_LAUNCHER",
        "LOCKSTEP_PLAN",
        "LOCKSTEP_RUN_DIR",
        "OMP_NUM_THREADS",
    )
    return {name: os.environ.get(name) for name in names} | {
        "rank at import": RANK,
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "leads a session": os.getpid() == os.getsid(0),
        "torch": "torch" in sys.modules,
    }


def large() -> bytes:
    return b"x" * (4 << 20)


def unpicklable() -> Any:
    return lambda: 3


def fail(how: str) -> None:
    """Fail on rank 1; the others wait until they are ended."""
    if rank() == 1:
        _fail(how)
    if rank() != 1:
        signal.pause()


def _fail(how: str) -> NoReturn:
    if how == "error":
        raise ValueError("boom")
    if how == "user error":
        raise DataError("value; rule; remedy")
    if how == "own user error":
        raise Refused("value", rule="rule")
    if how == "exit":
        sys.exit(3)
    if how == "interrupt":
        os.kill(os.getppid(), signal.SIGINT)
    if how == "terminate":
        os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def killed() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def rank() -> int:
    return int(os.environ["RANK"])


def all_reduced() -> float:
    """Return 1 + 2 + ... over the ranks, from a Gloo group that is never destroyed."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor(float(rank() + 1))
    dist.all_reduce(value)
    return value.item()


def print_line() -> None:
    print(json.dumps({"rank": rank()}))


def searches_safely() -> tuple[str | None, str]:
    """PYTHONSAFEPATH here, and whether a Python that this process starts leaves out the working
    directory."""
    child = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys.flags.safe_path)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return os.environ.get("PYTHONSAFEPATH"), child.stdout.strip()
