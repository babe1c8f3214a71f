"""Reads the rank of this process and the options of its run from environment variables of the
launcher. Computes the number of processes to start."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from lockstep.base.container import usable_cpus
from lockstep.base.errors import LaunchError
from lockstep.options import MPI_SIZES, RunOptions, non_negative_int, read_options
from lockstep.plan import Plan, Size

Launcher = Literal["python", "torchrun", "lockstep", "spawn", "srun"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment(RunOptions):
    rank: int
    local_rank: int
    """Rank among the processes of this machine. Also the index of the GPU if the process sees all
    GPUs."""
    world_size: int
    local_world_size: int
    launcher: Launcher
    """`python` is no launcher. `srun` is Slurm with one process per task. `torchrun` is any other
    launcher that sets RANK and WORLD_SIZE, except lockstep's."""
    threads: int
    """Number of intra-op threads: OMP_NUM_THREADS if set (torchrun sets 1 by default), else usable
    CPUs ÷ processes of this machine."""
    restarts: int = 0

    @property
    def place(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "size": self.world_size,
            "local_rank": self.local_rank,
            "local_size": self.local_world_size,
            "backend": self.backend,
            "share_devices": self.share_devices,
        }

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Environment:
        """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE. Without these variables, this
        process is rank 0 of 1. Without LOCAL_RANK and LOCAL_WORLD_SIZE, all processes are assumed
        to be on this machine."""
        _not_by_mpirun(environ)
        _both_or_neither(environ, "RANK", "WORLD_SIZE")
        _both_or_neither(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "LOCAL_RANK" in environ and "RANK" not in environ:
            raise LaunchError(
                f"LOCAL_RANK={environ['LOCAL_RANK']} without RANK; a launcher sets RANK,"
                " WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; unset LOCAL_RANK and"
                " LOCAL_WORLD_SIZE to run one process, or start the script with lockstep run"
            )
        rank = _count(environ, "RANK", 0)
        world_size = _count(environ, "WORLD_SIZE", 1)
        local_rank = _count(environ, "LOCAL_RANK", rank)
        local_world_size = _count(environ, "LOCAL_WORLD_SIZE", world_size)
        _below("RANK", rank, "WORLD_SIZE", world_size)
        _below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
        if local_world_size > world_size:
            raise LaunchError(
                f"LOCAL_WORLD_SIZE={local_world_size} with WORLD_SIZE={world_size}; a machine's"
                " processes are a part of all processes; correct what sets them"
            )
        return cls(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            launcher=_launcher(environ),
            threads=_threads(environ, local_world_size),
            restarts=_count(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            **read_options(environ),
        )


def _launcher(environ: Mapping[str, str]) -> Launcher:
    name = environ.get("LOCKSTEP_LAUNCHER", "torchrun" if "RANK" in environ else "python")
    if name not in get_args(Launcher):
        raise LaunchError(
            f"LOCKSTEP_LAUNCHER={name}; lockstep's launchers set it to one of"
            f" {', '.join(get_args(Launcher))}; unset it"
        )
    return cast(Launcher, name)


def _threads(environ: Mapping[str, str], local_world_size: int) -> int:
    asked = _count(environ, "OMP_NUM_THREADS", 0)
    if _launcher(environ) == "torchrun" and asked == 1:
        asked = 0
    return asked or threads_per_process(local_world_size)


def threads_per_process(count: int) -> int:
    return max(1, usable_cpus() // count)


def _not_by_mpirun(environ: Mapping[str, str]) -> None:
    started = next((name for name in MPI_SIZES if environ.get(name, "1") != "1"), None)
    if "RANK" not in environ and started is not None:
        raise LaunchError(
            f"{started}={environ[started]} without RANK: mpirun has started this process, and"
            " gives no address at which the processes can connect; start the script with lockstep"
            " run (one on each machine: mpirun -npernode 1 lockstep run --nnodes N --rdzv"
            " HOST:PORT SCRIPT), or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,"
            " MASTER_ADDR and MASTER_PORT for each process"
        )


def _both_or_neither(environ: Mapping[str, str], one: str, other: str) -> None:
    for given, missing in ((one, other), (other, one)):
        if given in environ and missing not in environ:
            raise LaunchError(
                f"{given}={environ[given]} without {missing}; a launcher sets both; unset {given}"
                f" to run one process, or set {missing}"
            )


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    return default if text is None else non_negative_int(text, name)


def _below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise LaunchError(
            f"{name}={value} with {limit_name}={limit}; ranks count from 0 to {limit_name} - 1;"
            " correct what sets them"
        )


def count_processes(
    asked: str | int, plan: Plan | None, count_gpus: Callable[[], int], *, name: str
) -> int:
    """Return the number of processes to start. `asked` is a number, `auto` or `gpu`. `auto` is the
    product of the plan's axes if all axes have a size, else one process per GPU, or one process
    without a GPU."""
    sizes: list[Size] = list(plan.axis_sizes.values()) if plan is not None else ["auto"]
    if asked == "auto":
        fixed = [size for size in sizes if size != "auto"]
        number = math.prod(fixed) if len(fixed) == len(sizes) else max(1, count_gpus())
    elif asked == "gpu":
        number = count_gpus()
        if number == 0:
            from lockstep.base import accelerator  # imports torch

            why = accelerator.unseen(os.environ) or "torch sees no GPU here"
            raise LaunchError(
                f"{name}gpu; it starts one process per GPU, and {why}; give a number, or auto"
            )
    else:
        number = _number(asked, name)
    if plan is not None:
        plan.resolve(number)
    return number


def _number(asked: str | int, name: str) -> int:
    try:
        number = int(asked)
    except ValueError:
        number = 0
    if number < 1 or isinstance(asked, bool):
        raise LaunchError(
            f"{name}{asked}; it takes a whole number of processes, at least 1, or auto (from the"
            " plan, else one per GPU, else 1), or gpu (one per GPU); give one of those"
        )
    return number
