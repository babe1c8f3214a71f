"""The options of a launch. Each option is declared once, as a field of `RunOptions` or
`LaunchOptions`. The fields define the command line of `lockstep run`, and the environment variables
of workers. A field `save_every` is `--save-every` on the command line and LOCKSTEP_SAVE_EVERY in
the environment. An option of the launcher replaces the script's value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, Literal, cast, get_args

from lockstep.base.errors import LaunchError, RunDirectoryError
from lockstep.base.units import seconds
from lockstep.plan import Plan
from lockstep.recipe.parameters import read_assignments, split_assignment
from lockstep.saving import OutOfMemory, Resume, interval

OnHang = Literal["end", "report"]
"""`end` reports the hang, saves the last complete step, and exits with status 76. `report` reports
the hang, and the run keeps waiting."""
Recovery = Literal["in-place", "shrink", "restart"]

TIMES_USUAL = 20.0
"""Timeout of a phase, as a multiple of its usual time."""
LEAST_STEP_SECONDS = 60.0
"""Smallest timeout of a phase in `STEP_PHASES`."""
LEAST_OTHER_SECONDS = 300.0
"""Smallest timeout of all phases that are not in `STEP_PHASES`. The times of phases outside of a
step depend on disks, networks and users' code."""
FIRST_SECONDS = 540.0
"""Timeout of a phase that has never ended. Gloo and NCCL give up after 600 seconds."""
STEP_PHASES = ("compute", "exchange", "update", "waiting for the device")


@dataclass(frozen=True, slots=True)
class WatchdogTimeouts:
    """The time after which a rank counts as hanging, for each phase of its work (data, compute,
    exchange, …)."""

    fixed_seconds: float | None = None
    """The timeout of every phase. With None, the timeout is a multiple of the phase's usual
    time."""
    on_hang: OnHang = "end"

    @classmethod
    def parse(cls, hang_after: str | None, on_hang: str | None) -> WatchdogTimeouts | None:
        """Return None for "off". `hang_after` is "auto" (also None), "off", or a time."""
        if on_hang is not None and on_hang not in get_args(OnHang):
            raise LaunchError(
                f"--on-hang={on_hang!r}; it must be one of {', '.join(get_args(OnHang))}"
            )
        if hang_after == "off":
            return None
        fixed = (
            None
            if hang_after in (None, "auto")
            else seconds(str(hang_after), "--hang-after", LaunchError)
        )
        return cls(fixed, cast(OnHang, on_hang or "end"))

    def limit_seconds(self, phase: str, usual_seconds: float | None) -> float:
        """Return the timeout of a phase. `usual_seconds` is the recent duration of the phase.
        `usual_seconds` is None if the phase has never ended."""
        if self.fixed_seconds is not None:
            return self.fixed_seconds
        if usual_seconds is None:
            return FIRST_SECONDS
        return max(
            LEAST_STEP_SECONDS if phase in STEP_PHASES else LEAST_OTHER_SECONDS,
            TIMES_USUAL * usual_seconds,
        )


LAUNCHER_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "GROUP_RANK",
)
"""Environment variables by which launchers give a process its rank."""
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Environment variables with the number of processes of mpirun, for Open MPI, for MPICH and Intel
MPI, and for MVAPICH2."""
COMPARE_EVERY = 100


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart of the workers by the launcher."""

    reason: str
    in_place: bool = False
    """True if the surviving workers kept running."""
    not_in_place: str | None = None
    """The reason why a requested recovery in place was not possible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """The documentation of an option, and the conversion between its value and text."""

    help: str
    kind: type = str
    """`str`, `int`, `float` (seconds since 1970), `bool`, `frozenset` (names, separated by commas),
    or `Restart` (JSON). `tuple` has one text for each time that the option is given, and is a JSON
    list in the environment."""
    metavar: str | None = None
    """Placeholder for the value in `--help`. None for flags and for `choices`."""
    choices: Sequence[str] = ()
    least: int = 0
    most: int | None = None
    worker_default: Any = None
    """The value for a worker if the option was not given and the field's default is None."""
    on_command_line: bool = True
    """False if only a launcher sets the option, in the environment."""
    shared: bool = True
    """True if all ranks must have the same value. Ranks with different values of a shared option
    would call different collectives."""

    def read(self, text: str, name: str) -> Any:
        if self.kind is int:
            return non_negative_int(text, name)
        if self.kind is frozenset:
            return read_names(text)
        if self.kind is Restart:
            try:
                return Restart(**json.loads(text))
            except (TypeError, ValueError):
                raise LaunchError(f"{name}={text!r}; launchers set it, as JSON; unset it") from None
        if self.kind is tuple:
            return read_assignments(text, name)
        if self.kind is bool:
            if text not in ("0", "1"):
                raise LaunchError(
                    f"{name}={text!r}; it must be 1 for yes, or 0; correct what sets it, or unset"
                    " it"
                )
            return text == "1"
        if self.kind is float:
            try:
                return float(text)
            except ValueError:
                raise LaunchError(
                    f"{name}={text!r}; it must be a time in seconds since 1970; correct what sets"
                    " it, or unset it"
                ) from None
        return text

    def write(self, value: Any) -> str:
        if self.kind is frozenset:
            return ",".join(sorted(value))
        if self.kind is tuple:
            return json.dumps(value)
        if self.kind is Restart:
            return json.dumps(asdict(value))
        return str(int(value)) if self.kind is bool else str(value)


def _option(default: Any, help: str, **details: Any) -> Any:
    return field(default=default, metadata={"option": Option(help=help, **details)})


def option_of(declared: Field[Any]) -> Option:
    option: Option = declared.metadata["option"]
    return option


def flag(name: str) -> str:
    """For example `--save-every` for `save_every`."""
    return f"--{name.replace('_', '-')}"


def variable(name: str) -> str:
    """For example LOCKSTEP_SAVE_EVERY for `save_every`."""
    return f"LOCKSTEP_{name.upper()}"


OTHER_VARIABLES = {
    "launcher": "The launcher of a process, see `launch.environment.Launcher`.",
    "request": "The file with a command's request to the script, see `scripts.request`.",
    "worker": "What a launcher tells one process, see `launch.worker_files.WorkerStart`.",
    "started_by": "Whose worker has started a process, see `launch.worker_files`.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options that a launcher gives to the processes of a run. Workers read the options from their
    environment. The environment variables also apply under torchrun and srun, and to `lockstep
    run`. The command line of `lockstep run` replaces the environment variables. A field with its
    default value counts as not given."""

    plan: str | None = _option(
        None,
        'How the recipe is executed, such as "replicate=2,numerics=bitwise". Default: the plan of'
        " the script.",
        metavar="PLAN",
    )
    run_dir: str | None = _option(
        None,
        "The run directory, which the run writes to. Default: that of the script, or a new one.",
        metavar="DIR",
        shared=False,
    )
    resume: str | None = _option(
        None,
        "If DIR holds an unfinished run: continue it (auto) or refuse (never). must refuses if it"
        " holds none. Default: auto, or what the script says.",
        choices=get_args(Resume),
    )
    save_every: str | None = _option(
        None,
        "Steps (500) or time (10m) from one checkpoint to the next, or epoch: one after each."
        " Default: 10m, or what the script says.",
        metavar="STEPS|TIME|epoch",
    )
    out_of_memory: str | None = _option(
        None,
        "What changes in the plan when memory runs out. retry (default): what needs less memory;"
        " under numerics=bitwise nothing that changes bits. halve: that too. same-bits: under any"
        " numerics nothing that changes bits. stop: nothing.",
        choices=get_args(OutOfMemory),
    )
    hang_after: str | None = _option(
        None,
        "How long a process may make no progress before the watchdog acts. auto (default): a"
        " multiple of what each phase usually takes.",
        metavar="TIME|auto|off",
    )
    on_hang: str | None = _option(
        None,
        "The watchdog reports a hang and ends the run (end, default), or reports it and waits on.",
        choices=get_args(OnHang),
    )
    compare_every: int | None = _option(
        None,
        "Steps from one comparison of the replicas to the next. 0: never. Default:"
        f" {COMPARE_EVERY}.",
        kind=int,
        metavar="STEPS",
        worker_default=COMPARE_EVERY,
    )
    recompute_every: int | None = _option(
        None,
        "Steps from one check of the computation to the next: each process recomputes a microbatch"
        " of another one. Needs numerics=bitwise. 0 (default): never.",
        kind=int,
        metavar="STEPS",
    )
    profile: str | None = _option(
        None,
        "Trace steps A to B - 1 on every rank, on one clock, and report where their time and memory"
        " went.",
        metavar="steps=A:B",
    )
    check: bool = _option(
        False,
        "Compare every collective across ranks before it is called. Slow; meant for finding the"
        " cause of a hang.",
        kind=bool,
    )
    backend: str | None = _option(
        None,
        "Backend of torch.distributed for the tensors on the device. Default: torch's own for it:"
        " nccl, xccl, or on CPUs gloo.",
        metavar="NAME",
    )
    share_devices: bool = _option(
        False,
        "Let several processes compute on one GPU, to try a plan on fewer GPUs than it needs. Slow;"
        " the numbers are the same.",
        kind=bool,
    )
    allow_change: frozenset[str] = _option(
        frozenset(),
        "Fields of the recipe that may differ from those of the run that is continued:"
        " steps,schedule.",
        kind=frozenset,
        metavar="FIELDS",
    )
    set: tuple[str, ...] = _option(
        (),
        "The value of a hyper-parameter, for a script that calls ls.param. Give it once for each.",
        kind=tuple,
        metavar="NAME=VALUE",
    )
    stop_at: float | None = _option(
        None,
        "When the run saves and ends, in seconds since 1970.",
        kind=float,
        on_command_line=False,
        shared=False,
    )
    default_run_dir: str | None = _option(
        None,
        "The run directory if neither the launcher nor the script names one.",
        on_command_line=False,
        shared=False,
    )
    restarted: Restart | None = _option(  # noqa: RUF009
        None,
        "Why and how the launcher started the workers again. Not set at their first start.",
        kind=Restart,
        on_command_line=False,
        shared=False,
    )

    def to_environment(self) -> dict[str, str]:
        """Return environment variables. Omits options with their default value."""
        given = ((each, getattr(self, each.name)) for each in fields(RunOptions))
        return {
            variable(each.name): option_of(each).write(value)
            for each, value in given
            if value != each.default
        }

    def shared(self) -> dict[str, str]:
        values = {
            each.name: getattr(self, each.name)
            for each in fields(RunOptions)
            if option_of(each).shared
        }
        return {
            variable(name): str(sorted(value) if isinstance(value, frozenset) else value)
            for name, value in values.items()
        }


def read_options(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for each in fields(RunOptions):
        option = option_of(each)
        if text := environ.get(variable(each.name)):
            values[each.name] = option.read(text, variable(each.name))
        elif option.worker_default is not None:
            values[each.name] = option.worker_default
    return values


def check_shared_options(everyone: Sequence[Mapping[str, str]]) -> None:
    """Raise an error unless all ranks have the same shared options. Every rank must call this
    function with the same values, so either all ranks raise or none."""
    for rank, given in enumerate(everyone):
        for name, value in given.items():
            if value != everyone[0][name]:
                raise LaunchError(
                    f"{name} is {everyone[0][name]} for rank 0 and {value} for rank {rank}; all"
                    " processes of a run get the same; set it for all of them, or for none"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions(RunOptions):
    """All options of `lockstep run`: options of its workers, and options that only the launcher
    needs."""

    nproc: str = _option(
        "auto",
        "Processes to start on this machine. auto (default): as many as the plan has, or one per"
        " GPU, or 1. gpu: one per GPU.",
        metavar="N|auto|gpu",
    )
    stop_after: str | None = _option(
        None,
        "Save and end this long after the start of the command, such as 55m, with exit status 75.",
        metavar="TIME",
    )
    max_restarts: int = _option(
        0,
        "Start the processes again after a failure, at most R times in the whole run. Default: 0.",
        kind=int,
        metavar="R",
    )
    recovery: str = _option(
        "restart",
        "What --max-restarts does. in-place: where it can be done, the processes that are left wait"
        " for a new one and go on with it. shrink: they go on without the lost one. restart"
        " (default): all are started again.",
        choices=get_args(Recovery),
    )
    nnodes: str | None = _option(
        None,
        "Machines: N, or at least A and at most B. Give the same command on each. Default: 1, or"
        " the nodes of the Slurm job.",
        metavar="N|A:B",
    )
    rdzv: str | None = _option(
        None,
        "Where the machines meet: the address of one of them and a free port there.",
        metavar="HOST:PORT",
    )
    node_rank: int | None = _option(
        None,
        "Instead of --rdzv, with the next two: the number of this machine, from 0.",
        kind=int,
        metavar="R",
    )
    master_addr: str | None = _option(None, "The address of machine 0.", metavar="HOST")
    master_port: int | None = _option(
        None, "A free port of machine 0.", kind=int, least=1, most=65535, metavar="PORT"
    )
    interface: str | None = _option(
        None,
        "The network interface to use. Default: the one that leads to the rendezvous.",
        metavar="NAME",
    )
    strict: bool = _option(
        False,
        "Fail, with status 2, if the script takes none of the options that are for it.",
        kind=bool,
    )
    local_rank_argument: bool = _option(
        False, "Give SCRIPT --local_rank=N, as torch.distributed.launch does.", kind=bool
    )

    def _check_recovery(self, plan: Plan | None) -> None:
        given = f"--recovery {self.recovery}"
        if self.recovery == "restart":
            return
        if self.max_restarts == 0:
            raise LaunchError(
                f"{given} with --max-restarts 0; each recovery counts as a restart; give"
                " --max-restarts 3, say"
            )
        if self.local_rank_argument:
            raise LaunchError(
                f"{given} with --local-rank-argument; a process gets its rank after its start, or"
                " another one; leave out one"
            )
        if self.recovery == "shrink" and self.nnodes not in (None, "1"):
            raise LaunchError(
                f"{given} with --nnodes {self.nnodes}; over several machines --recovery in-place"
                " continues without a lost machine, and replaces a single process; give that one"
            )
        if self.recovery == "shrink" and plan is not None and not plan.fits_several_sizes:
            raise LaunchError(
                f"{given} with --plan {self.plan}, which fits one number of processes; a run that"
                " loses a process continues with fewer; give replicate=auto or shard=auto, or"
                " --recovery in-place"
            )

    def validate(self) -> Plan | None:
        plan = Plan.parse(self.plan) if self.plan is not None else None
        check_run_dir(self.run_dir, flag("run_dir"))
        if self.backend == "":
            raise LaunchError(
                "--backend ''; it must be the name of a backend of torch.distributed, such as"
                " gloo; leave it out for torch's own"
            )
        if self.save_every is not None:
            interval(self.save_every, flag("save_every"))
        if self.stop_after is not None:
            seconds(self.stop_after, flag("stop_after"), LaunchError)
        WatchdogTimeouts.parse(self.hang_after, self.on_hang)
        for text in self.set:
            split_assignment(text)
        self._check_recovery(plan)
        return plan

    def for_workers(self, *, default_run_dir: str, now_seconds: float) -> RunOptions:
        """Return the options of the workers. Paths become absolute, and `--stop-after` becomes a
        point in time. `now_seconds` is in seconds since 1970."""
        values = {each.name: getattr(self, each.name) for each in fields(RunOptions)} | {
            "default_run_dir": default_run_dir
        }
        if self.run_dir is not None:
            values["run_dir"] = os.path.abspath(self.run_dir)
        if self.stop_after is not None:
            values["stop_at"] = now_seconds + seconds(
                self.stop_after, flag("stop_after"), LaunchError
            )
        return RunOptions(**values)

    def flags_for_script(self) -> list[str]:
        """Return the given command-line options that only a script with lockstep reads."""
        return [flag(name) for name in self._given_for_script()]

    def same_on_all_machines(self) -> list[str]:
        """Return the options that must be the same on every machine of a run, as texts such as
        "plan=shard=2"."""
        return [f"{name}={value}" for name, value in self._given_for_script().items()]

    def _given_for_script(self) -> dict[str, str]:
        return {
            each.name: option_of(each).write(value)
            for each in fields(LaunchOptions)
            if option_of(each).on_command_line
            and (each.name == "stop_after" or each.name in RunOptions.__slots__)
            and (value := getattr(self, each.name)) != each.default
        }

    def arguments(self) -> list[str]:
        """Return the arguments of `lockstep run` that give these options."""
        words = []
        for each in fields(LaunchOptions):
            option, value = option_of(each), getattr(self, each.name)
            if option.kind is tuple:
                words += [word for text in value for word in (flag(each.name), text)]
            elif value != each.default and option.on_command_line:
                words += (
                    [flag(each.name)]
                    if option.kind is bool
                    else [flag(each.name), option.write(value)]
                )
        return words


def read_names(text: str) -> frozenset[str]:
    return frozenset(filter(None, map(str.strip, text.split(","))))


def non_negative_int(text: str, name: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise LaunchError(
            f"{name}={text!r}; it must be a whole number of at least 0; correct what sets it, or"
            " unset it"
        )
    return value


def check_run_dir(run_dir: str | os.PathLike[str] | None, name: str) -> None:
    """Refuse a URL, and an empty path, which would mean the working directory. `name` is the option
    or keyword with the path."""
    if run_dir == "":
        raise RunDirectoryError(
            f"{name} is empty; it names the folder that the run writes to (is a shell variable"
            f" unset?); give a path, or leave {name} out"
        )
    # str(Path("s3://bucket")) is "s3:/bucket"
    if run_dir is not None and re.match(r"[A-Za-z][\w+.-]+:/", os.fspath(run_dir)):
        raise RunDirectoryError(
            f"{name} is '{run_dir}', a URL; a run directory is a folder of this machine; give a"
            " path, and ls.Saving(folder=URL) for checkpoints at a URL"
        )
