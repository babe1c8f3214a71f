"""What tests run on ranks of the stand-in accelerator, and commands whose processes have it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import forked
import torch
import torch.distributed as dist
from processes import ran
from stand_in import build

from lockstep.testing.pool import WorkerPool

T = TypeVar("T")


def on_device(function: Callable[..., T], *args: Any) -> T:
    """Call a function on a rank whose process group is the device's, as after `lockstep run`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch.accelerator.set_device_index(rank)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    dist.init_process_group(
        "cpu:gloo,standin:standin_gloo",
        store=dist.PrefixStore("devices", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    return function(*args)


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a command with two devices, which may import what tests do."""
    given = {**os.environ, **build.environment(2), "OMP_NUM_THREADS": "1"}
    given["PYTHONPATH"] += f":{build.ROOT / 'tests'}"
    return {**given, "TMPDIR": str(folder)}  # torchrun leaves a folder


def command(
    devices: WorkerPool, folder: Path, *arguments: str, seconds: float = 100, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` on the devices of the pool. Its Python processes are forks of a rank:
    none of them imports torch."""
    line, given = [sys.executable, *arguments], {**environment(folder), **variables}
    (ended,) = devices.run(1, _in_forks, line, given, folder, seconds, timeout_seconds=seconds + 10)
    return ended


def _in_forks(
    line: list[str], given: dict[str, str], folder: Path, seconds: float
) -> subprocess.CompletedProcess[str]:
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(given)
    with forked.use():
        return ran(line, cwd=folder, timeout=seconds)
