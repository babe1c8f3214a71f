"""The batch script of a run, and Slurm's descriptions of jobs and steps. Pure: does not call
Slurm."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.base.errors import LaunchError
from lockstep.launch.termination import PREEMPTED_STATUS
from lockstep.options import flag

_FIRST_PORT, _PORTS = 10000, 20000
"""Ports below the range that Linux assigns to programs."""
_PORTS_BETWEEN_STEPS = 997
_ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
    "REVOKED",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchScript:
    """The contents of a batch script. Made by `lockstep slurm`, and by `lockstep search
    --slurm`."""

    script: str = ""
    arguments: Sequence[str] = ()
    """Arguments of the script."""
    run: Sequence[str] = ()
    """Options of `lockstep run`."""
    name: str
    nodes: int
    gpus_per_node: int | None = None
    """None: the script does not mention GPUs."""
    cpus_per_task: int | None = None
    """CPUs for all processes of a node. None: all, because the job has its nodes to itself."""
    time: str
    """The time limit, as Slurm writes times."""
    signal_seconds: int = 120
    """Seconds before the limit when the run must save and end."""
    path: str | None = None
    """The folder that contains `lockstep`, for PATH. None: PATH stays as it is."""
    setup: Sequence[str] = ()
    """Lines of shell before the run."""
    command: Sequence[str] = ()
    """The command of each node, instead of `lockstep run` with `run`, `script` and `arguments`."""
    sbatch: Sequence[str] = ()
    """Further options of sbatch."""

    def text(self) -> str:
        """The batch script. Raises `LaunchError` if the options contradict each other."""
        limit = limit_seconds(self.time)
        if limit is not None and self.signal_seconds >= limit:
            raise LaunchError(
                f"--signal-before {self.signal_seconds}s with --time {self.time}; the run saves "
                "and ends that long before the limit; shorten --signal-before, or give the job "
                "more time"
            )
        setup = [
            *([f"export PATH={shlex.quote(self.path)}:$PATH"] if self.path is not None else []),
            *self.setup,
        ]
        parts = [
            ["#!/bin/bash", *(f"#SBATCH {option}" for option in self._options())],
            ["# The environment of the run.", *setup] if setup else [],
            self._step(),
            [
                (
                    f"# {PREEMPTED_STATUS}: it was asked to end, before the time limit or for"
                    " another job, and has saved. It will go on."
                ),
                f'if [ "$status" -eq {PREEMPTED_STATUS} ]; then',
                '    scontrol requeue "$SLURM_JOB_ID"',
                "fi",
                'exit "$status"',
            ],
        ]
        return "\n\n".join("\n".join(part) for part in parts if part) + "\n"

    def _options(self) -> Iterator[str]:
        yield f"--job-name={self.name}"
        yield f"--nodes={self.nodes}"
        yield "--ntasks-per-node=1  # lockstep run starts the processes of its node"
        if self.gpus_per_node is not None:
            yield f"--gpus-per-node={self.gpus_per_node}"
        yield (
            f"--cpus-per-task={self.cpus_per_task}"
            if self.cpus_per_task is not None
            else "--exclusive"
        )
        yield f"--time={self.time}"
        yield (
            f"--signal=USR1@{self.signal_seconds}  # so many seconds before that, the run saves and"
            " ends"
        )
        yield "--requeue"
        yield "--open-mode=append"
        yield f"--output={self.name}-%j.txt"
        yield from self.sbatch

    def _step(self) -> list[str]:
        cpus = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task is not None else []
        srun = [
            "srun",
            *cpus,
            "--kill-on-bad-exit=0",
            "--open-mode=append",
            f"--output={self.name}-%j-%n-%N.txt",
        ]
        if self.command:
            return [f"{' '.join(srun)} \\", f"    {shlex.join(self.command)}", "status=$?"]
        has_run_dir = any(option.partition("=")[0] == flag("run_dir") for option in self.run)
        run_dir = [] if has_run_dir else [f'{flag("run_dir")} "runs/{self.name}-$SLURM_JOB_ID"']
        run = ["lockstep run", *run_dir, shlex.join([*self.run, self.script, *self.arguments])]
        return [
            (
                "# The nodes meet at the first of them, at a port made of the job's number:"
                " lockstep run sees both in what srun sets."
            ),
            (
                "# Each node's output goes to a file of its own. A node that has ended does not end"
                " the others: they may be saving."
            ),
            f"{' '.join(srun)} \\",
            f"    {' '.join(run)}",
            "status=$?",
        ]


def limit_seconds(time: str) -> int | None:
    """Seconds of a time limit as Slurm writes it; None if it is unlimited. Raises `LaunchError`."""
    if time in ("infinite", "UNLIMITED"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if found is None:
        raise LaunchError(
            f"--time {time}; it is a time as Slurm writes it: minutes, minutes:seconds,"
            " hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds;"
            " give one of those"
        )
    days, *given = found.groups()
    numbers = [int(each) for each in given if each is not None]
    if days is not None:
        numbers += [0] * (3 - len(numbers))
    elif len(numbers) < 3:
        numbers = [0, *numbers, *([0] if len(numbers) == 1 else [])]
    hours, minutes, seconds = numbers
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmStep:
    """A Slurm step, as srun describes it to each of its tasks."""

    nodes: Sequence[str]
    tasks: Sequence[int]
    """Number of tasks on each node."""
    node: int
    """Index of this node."""
    task: int
    """Index of this task among all."""
    local_task: int
    """Index of this task on its node."""
    port: int
    """Port of the rendezvous, at the first node."""
    cpus: int | None
    """CPUs for each task. None: not asked for."""
    gpus: int | None
    """GPUs of the job on this node. None: there are none."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> SlurmStep | None:
        """The step of this task; None outside of srun, as in a batch script. Raises
        `LaunchError`."""
        if "SLURM_STEP_ID" not in environ:
            return None
        try:
            return cls(
                nodes=expand_nodes(environ["SLURM_STEP_NODELIST"]),
                tasks=expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"]),
                node=int(environ["SLURM_NODEID"]),
                task=int(environ["SLURM_PROCID"]),
                local_task=int(environ["SLURM_LOCALID"]),
                port=_FIRST_PORT
                + (
                    int(environ["SLURM_JOB_ID"])
                    + _PORTS_BETWEEN_STEPS * int(environ["SLURM_STEP_ID"])
                )
                % _PORTS,
                cpus=(
                    int(environ["SLURM_CPUS_PER_TASK"])
                    if "SLURM_CPUS_PER_TASK" in environ
                    else None
                ),
                gpus=(
                    int(environ["SLURM_GPUS_ON_NODE"]) if "SLURM_GPUS_ON_NODE" in environ else None
                ),
            )
        except (KeyError, ValueError) as error:
            raise LaunchError(
                f"SLURM_STEP_ID={environ['SLURM_STEP_ID']}, but srun's other variables are missing "
                f"or incomplete ({error!r}); start the script by srun, or unset SLURM_STEP_ID"
            ) from None

    def check_launchers(self) -> None:
        """Raise `LaunchError` unless each node has one task."""
        if any(count != 1 for count in self.tasks):
            raise LaunchError(
                f"srun started {sum(self.tasks)} times lockstep run on {len(self.nodes)} nodes; it"
                " starts the processes of its node itself; srun --ntasks-per-node=1 lockstep run,"
                " or srun python SCRIPT, which needs no launcher"
            )

    def variables(self, address: str) -> dict[str, str]:
        """The variables that a launcher would set for this task of a run. `address`: of the first
        node."""
        values = {
            "RANK": self.task,
            "WORLD_SIZE": sum(self.tasks),
            "LOCAL_RANK": self.local_task,
            "LOCAL_WORLD_SIZE": self.tasks[self.node],
            "MASTER_ADDR": address,
            "MASTER_PORT": self.port,
            "LOCKSTEP_LAUNCHER": "srun",
        }
        if self.cpus is not None:
            values["OMP_NUM_THREADS"] = self.cpus
        return {name: str(value) for name, value in values.items()}


def expand_nodes(text: str) -> list[str]:
    """The node names in a list as Slurm writes it: `a[1-2,05],b` is a1, a2, a05, b. Raises
    `ValueError`."""
    if re.fullmatch(r"(?:[^\[\],\s]|\[[\d,-]+\])+(?:,(?:[^\[\],\s]|\[[\d,-]+\])+)*", text) is None:
        raise ValueError(f"no list of nodes: {text!r}")
    return [name for each in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text) for name in _names(each)]


def _names(pattern: str) -> list[str]:
    before, bracket, rest = pattern.partition("[")
    if not bracket:
        return [pattern]
    numbers, _, after = rest.partition("]")
    found = []
    for each in numbers.split(","):
        first, _, last = each.partition("-")
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return [f"{before}{number}{tail}" for number in found for tail in _names(after)]


def expand_counts(text: str) -> list[int]:
    """Numbers of tasks per node, as Slurm writes them: `2(x3),1` is 2, 2, 2, 1. Raises
    `ValueError`."""
    counts: list[int] = []
    for each in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each)
        if found is None:
            raise ValueError(f"no numbers of tasks: {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """The state of a job."""

    state: str
    reason: str
    nodes: str
    restarts: int
    exit_status: int
    """Exit status of the batch script, as a shell shows it."""

    @classmethod
    def read(cls, text: str) -> JobState:
        """Read one line of `scontrol show job --oneliner`. Raises `ValueError`."""
        fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", text))
        try:
            status, _, number = fields["ExitCode"].partition(":")
            return cls(
                state=fields["JobState"],
                reason=fields["Reason"],
                nodes=fields["NodeList"],
                restarts=int(fields["Restarts"]),
                exit_status=128 + int(number) if int(number) else int(status),
            )
        except KeyError as error:
            raise ValueError(f"no job's state: {text!r} lacks {error}") from None

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED

    @property
    def status(self) -> int:
        """Exit status for a command that followed the job to its end: 0 if the job has
        completed."""
        return 0 if self.state == "COMPLETED" else self.exit_status or 1

    def __str__(self) -> str:
        """The state in words: `runs on n[1-2] (restart 1)`."""
        again = f" (restart {self.restarts})" if self.restarts else ""
        if self.has_ended:
            return f"has ended: {self.state}, exit status {self.exit_status}"
        if self.state == "RUNNING":
            return f"runs on {self.nodes}{again}"
        return f"is {self.state.lower()} ({self.reason}){again}"
