"""One rank of the doctor with a planted fault: python faults.py FOLDER DEADLINE_SECONDS, with
FAULT=NAME in the environment.

The fault is in rank 1. A barrier that does nothing is planted in all ranks, because it would hang
if one rank alone skipped it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lockstep.doctor import collective_checks
from lockstep.doctor.worker import run

CULPRIT = 1
AHEAD_SECONDS = 30.0


def after(name: str, change: Callable[..., None]) -> None:
    """Have a collective of torch's do something more on one rank, when it is done."""
    holder = (
        collective_checks if name.endswith("_single") and hasattr(collective_checks, name) else dist
    )
    real = getattr(holder, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        change(*args)
        return result

    setattr(holder, name, wrapped)


def instead(act: Callable[[], object]) -> None:
    """Have the first all-reduce on one rank do this first."""
    real = dist.all_reduce

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act()
        return real(*args, **kwargs)

    dist.all_reduce = wrapped


def flip(tensor: Any, *_: Any) -> None:
    """Make the last number another."""
    tensor[-1] = tensor[-1] == 0


def hang() -> None:
    time.sleep(1000)


def refuse() -> None:
    raise RuntimeError("no such thing here")


def clock_ahead() -> None:
    real = time.time
    time.time = lambda: real() + AHEAD_SECONDS


FAULTS: dict[str, Callable[[], None]] = {
    "broadcast": lambda: after("broadcast", flip),
    "all-reduce": lambda: after("all_reduce", flip),
    "reduce": lambda: after("reduce", flip),
    "scatter": lambda: after("scatter", flip),
    "all-gather": lambda: after("all_gather_single", flip),
    "reduce-scatter": lambda: after("reduce_scatter_single", flip),
    "all-to-all": lambda: after("all_to_all_single", flip),
    "barrier": lambda: setattr(dist, "barrier", lambda *_, **__: None),
    "hang": lambda: instead(hang),
    "stop": lambda: instead(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "kill": lambda: instead(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "refuse": lambda: instead(refuse),
    "clock": clock_ahead,
}

if __name__ == "__main__":
    if int(os.environ["RANK"]) == CULPRIT or os.environ["FAULT"] == "barrier":
        FAULTS[os.environ["FAULT"]]()
    run(sys.argv[1:])
