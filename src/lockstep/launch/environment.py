"""Who this process is among the processes of a run, as its launcher says in environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from lockstep.base.errors import LaunchError, RunDirectoryError

ALIKE = ("plan", "resume", "save_every", "out_of_memory", "allow_change", "hang_after", "on_hang", "compare_every", "profile", "check")
"""What is the same for all processes of a run: by it they know which exchanges come."""
COMPARE_EVERY = 100
"""Steps between two comparisons of replicas, unless the launcher was told otherwise."""
Launcher = Literal["python", "torchrun", "lockstep", "spawn", "srun"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What the launcher says. Every process reads its own."""

    rank: int
    """Among all processes, from 0."""
    local_rank: int
    """Among the processes of this machine, from 0; the index of this process's GPU."""
    world_size: int
    """Processes in the run."""
    local_world_size: int
    """Processes on this machine."""
    launcher: Launcher
    """`python`: no launcher. `torchrun`: anything else that sets RANK and WORLD_SIZE. `srun`: each task of a Slurm step is a process."""
    plan: str | None
    """The plan given at launch, in the mini-language of `Plan.parse`. None: none was given."""
    run_dir: str | None
    """The run directory given at launch. None: none was given."""
    threads: int
    """Intra-op threads of this process: OMP_NUM_THREADS where somebody set it (torchrun sets 1 unasked), else cores ÷ processes."""
    resume: str | None = None
    """What was said at launch of an unfinished run in that directory. None: nothing."""
    save_every: str | None = None
    """The steps or the time between checkpoints, given at launch. None: none was given."""
    out_of_memory: str | None = None
    """What was said at launch of running out of memory. None: nothing."""
    allow_change: frozenset[str] = frozenset()
    """Fields of the recipe that may be others than those of the run that goes on, given at launch."""
    stop_at: float | None = None
    """When the run is to save and end, in seconds since 1970. None: at its end."""
    hang_after: str | None = None
    """How long a rank may stand still, given at launch, see `Patience.parse`. None: none was given."""
    on_hang: str | None = None
    """What happens then. None: nothing was said."""
    compare_every: int = COMPARE_EVERY
    """Steps between two comparisons of replicas; 0: never."""
    profile: str | None = None
    """Which steps to profile. None: none."""
    check: bool = False
    """Whether collectives are to be compared across ranks before they are made."""
    default_run_dir: str | None = None
    """The run directory where neither the launcher nor the script was given one. None: a new one."""
    restarted: str | None = None
    """Why the launcher started the workers again. None: it is their first start."""
    restarts: int = 0
    """How often it did so because one had failed."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Environment:
        """Read RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and our LOCKSTEP_LAUNCHER, LOCKSTEP_PLAN, LOCKSTEP_RUN_DIR,
        LOCKSTEP_DEFAULT_RUN_DIR, LOCKSTEP_RESUME, LOCKSTEP_SAVE_EVERY, LOCKSTEP_OUT_OF_MEMORY, LOCKSTEP_MAY_DIFFER, LOCKSTEP_STOP_AT,
        LOCKSTEP_HANG_AFTER, LOCKSTEP_ON_HANG, LOCKSTEP_CHECK,
        LOCKSTEP_COMPARE_EVERY, LOCKSTEP_PROFILE and LOCKSTEP_RESTARTED.

        Without any of the first four it is rank 0 of 1. Where the two local ones are missing, all processes are taken to be on this
        machine. Raises `LaunchError` where the values contradict each other.
        """
        _both_or_neither(environ, "RANK", "WORLD_SIZE")
        _both_or_neither(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "LOCAL_RANK" in environ and "RANK" not in environ:
            raise LaunchError(
                f"LOCAL_RANK={environ['LOCAL_RANK']} without RANK; a launcher sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; "
                "unset LOCAL_RANK and LOCAL_WORLD_SIZE to run one process, or start the script with lockstep run"
            )
        rank = _whole(environ, "RANK", 0)
        world_size = _whole(environ, "WORLD_SIZE", 1)
        local_rank = _whole(environ, "LOCAL_RANK", rank)
        local_world_size = _whole(environ, "LOCAL_WORLD_SIZE", world_size)
        _below(environ, "RANK", rank, "WORLD_SIZE", world_size)
        _below(environ, "LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
        if local_world_size > world_size:
            raise LaunchError(
                f"LOCAL_WORLD_SIZE={local_world_size} with WORLD_SIZE={world_size}; the processes of one machine are some of all "
                "processes; correct what sets them"
            )
        return cls(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            launcher=_launcher(environ),
            plan=environ.get("LOCKSTEP_PLAN") or None,
            run_dir=environ.get("LOCKSTEP_RUN_DIR") or None,
            default_run_dir=environ.get("LOCKSTEP_DEFAULT_RUN_DIR") or None,
            restarted=environ.get("LOCKSTEP_RESTARTED") or None,
            restarts=_whole(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            resume=environ.get("LOCKSTEP_RESUME") or None,
            save_every=environ.get("LOCKSTEP_SAVE_EVERY") or None,
            out_of_memory=environ.get("LOCKSTEP_OUT_OF_MEMORY") or None,
            allow_change=frozenset(filter(None, map(str.strip, environ.get("LOCKSTEP_MAY_DIFFER", "").split(",")))),
            stop_at=_time(environ, "LOCKSTEP_STOP_AT"),
            hang_after=environ.get("LOCKSTEP_HANG_AFTER") or None,
            compare_every=_whole(environ, "LOCKSTEP_COMPARE_EVERY", COMPARE_EVERY),
            profile=environ.get("LOCKSTEP_PROFILE") or None,
            check=_yes(environ, "LOCKSTEP_CHECK"),
            on_hang=environ.get("LOCKSTEP_ON_HANG") or None,
            threads=_threads(environ, local_world_size),
        )

    def alike(self) -> list[str]:
        """Of each of `ALIKE`, what was said, as text."""
        return [str(sorted(value) if isinstance(value := getattr(self, name), frozenset) else value) for name in ALIKE]


def check_alike(everyone: Sequence[Sequence[str]]) -> None:
    """`everyone`: what `Environment.alike` gave on each rank. Raises `LaunchError` on all alike where one was told otherwise."""
    for rank, said in enumerate(everyone):
        for name, first, other in zip(ALIKE, everyone[0], said, strict=True):
            if first != other:
                raise LaunchError(
                    f"LOCKSTEP_{name.upper()} is {first} for rank 0 and {other} for rank {rank}; all processes of a run are told the same; "
                    "set it for all of them, or for none"
                )


def check_run_dir(run_dir: str | None, name: str) -> None:
    """Refuse an empty path with a `RunDirectoryError`: it would name the working directory. `name`: what it was given as."""
    if run_dir == "":
        raise RunDirectoryError(
            f"{name} is empty; it names the folder that the run writes to (is a shell variable unset?); give a path, or leave {name} out"
        )


def _launcher(environ: Mapping[str, str]) -> Launcher:
    name = environ.get("LOCKSTEP_LAUNCHER", "torchrun" if "RANK" in environ else "python")
    if name not in get_args(Launcher):
        raise LaunchError(f"LOCKSTEP_LAUNCHER={name}; lockstep's launchers set it to one of {', '.join(get_args(Launcher))}; unset it")
    return cast(Launcher, name)


def _threads(environ: Mapping[str, str], local_world_size: int) -> int:
    asked = _whole(environ, "OMP_NUM_THREADS", 0)
    if _launcher(environ) == "torchrun" and asked == 1:
        asked = 0
    return asked or threads_per_process(local_world_size)


def threads_per_process(count: int) -> int:
    """Intra-op threads for each of `count` processes of this machine: the cores that this process may use, shared out, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // count)


def _both_or_neither(environ: Mapping[str, str], one: str, other: str) -> None:
    for given, missing in ((one, other), (other, one)):
        if given in environ and missing not in environ:
            raise LaunchError(
                f"{given}={environ[given]} without {missing}; a launcher sets both; unset {given} to run one process, or set {missing}"
            )


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise LaunchError(f"{name}={text!r}; it is a whole number of at least 0; correct what sets it, or unset it")
    return value


def _time(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r}; it is a time in seconds since 1970; correct what sets it, or unset it") from None


def _yes(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name) or "0"
    if text not in ("0", "1"):
        raise LaunchError(f"{name}={text!r}; it is 1 for yes, or 0; correct what sets it, or unset it")
    return text == "1"


def _below(environ: Mapping[str, str], name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise LaunchError(f"{name}={value} with {limit_name}={limit}; ranks count from 0 to {limit_name} - 1; correct what sets them")
