"""Slurm: the batch script of a run, descriptions of jobs and steps, and calls of Slurm's programs.
Does not import torch."""

from __future__ import annotations

import glob
import ipaddress
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lockstep.base.errors import LaunchError
from lockstep.launch.machines import Machines
from lockstep.launch.termination import PREEMPTED_STATUS
from lockstep.options import LaunchOptions, flag

_FIRST_PORT, _PORTS = 10000, 20000
"""Ports below the range that Linux assigns to programs."""
_PORTS_BETWEEN_STEPS = 997
_ENDED = [
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
]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchScript:
    script: str = ""
    arguments: Sequence[str] = ()
    run: Sequence[str] = ()
    name: str
    nodes: int
    gpus_per_node: int | None = None
    """None for a script that does not request GPUs."""
    cpus_per_task: int | None = None
    """Number of CPUs for all processes of a node. None for all CPUs, because the job uses its nodes
    exclusively."""
    time: str
    signal_seconds: int = 120
    """Time between Slurm's signal and the time limit. The run saves and ends after the signal."""
    path: str | None = None
    setup: Sequence[str] = ()
    command: Sequence[str] = ()
    """The command that runs on each node. An empty command stands for `lockstep run` with `run`,
    `script` and `arguments`."""
    sbatch: Sequence[str] = ()

    def text(self) -> str:
        limit = limit_seconds(self.time)
        if limit is not None and self.signal_seconds >= limit:
            raise LaunchError(
                f"--signal-before {self.signal_seconds}s with --time {self.time}; the run saves "
                "and ends that long before the limit; shorten --signal-before, or give the job "
                "more time"
            )
        setup = list(self.setup)
        if self.path is not None:
            setup.insert(0, f"export PATH={shlex.quote(self.path)}:$PATH")
        parts = [
            ["#!/bin/bash", *(f"#SBATCH {option}" for option in self._options())],
            ["# The environment of the run.", *setup] if setup else [],
            self._step(),
            [
                f"# {PREEMPTED_STATUS}: it was asked to end, before the time limit or for another"
                " job, and has saved. It will go on.",
                f'if [ "$status" -eq {PREEMPTED_STATUS} ]; then',
                '    scontrol requeue "$SLURM_JOB_ID"',
                "fi",
                'exit "$status"',
            ],
        ]
        return "\n\n".join("\n".join(part) for part in parts if part) + "\n"

    def _options(self) -> list[str]:
        gpus, cpus = self.gpus_per_node, self.cpus_per_task
        return [
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1  # lockstep run starts the processes of its node",
            *([] if gpus is None else [f"--gpus-per-node={gpus}"]),
            "--exclusive" if cpus is None else f"--cpus-per-task={cpus}",
            f"--time={self.time}",
            f"--signal=USR1@{self.signal_seconds}  # so many seconds before that, the run saves and"
            " ends",
            "--requeue",
            "--open-mode=append",
            f"--output={self.name}-%j.txt",
            *self.sbatch,
        ]

    def _step(self) -> list[str]:
        cpus = "" if self.cpus_per_task is None else f" --cpus-per-task={self.cpus_per_task}"
        output = f"--output={self.name}-%j-%n-%N.txt"
        srun = f"srun{cpus} --kill-on-bad-exit=0 --open-mode=append {output} \\"
        if self.command:
            return [srun, f"    {shlex.join(self.command)}", "status=$?"]
        run = ["lockstep run"]
        if not any(option.partition("=")[0] == flag("run_dir") for option in self.run):
            run.append(f'{flag("run_dir")} "runs/{self.name}-$SLURM_JOB_ID"')
        run.append(shlex.join([*self.run, self.script, *self.arguments]))
        return [
            "# The nodes meet at the first of them, at a port made of the job's number: lockstep"
            " run sees both in what srun sets.",
            "# Each node's output goes to a file of its own. A node that has ended does not end the"
            " others: they may be saving.",
            srun,
            f"    {' '.join(run)}",
            "status=$?",
        ]


def limit_seconds(time: str) -> int | None:
    if time in ("infinite", "UNLIMITED"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise LaunchError(
            f"--time {time}; it must be a time as Slurm writes it: minutes, minutes:seconds,"
            " hours:minutes:seconds, days-hours, days-hours:minutes or"
            " days-hours:minutes:seconds; give one of those"
        )
    days, *given = match.groups()
    numbers = [int(each) for each in given if each is not None]
    if days is not None:
        numbers += [0] * (3 - len(numbers))
    elif len(numbers) < 3:
        numbers = [0, *numbers, *([0] if len(numbers) == 1 else [])]
    hours, minutes, seconds = numbers
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmStep:
    """A Slurm step (the tasks of one srun). Read from the environment variables of a task."""

    nodes: Sequence[str]
    tasks: Sequence[int]
    """Number of tasks on each node, in the order of `nodes`."""
    node: int
    task: int
    local_task: int
    port: int
    cpus: int | None
    """Number of CPUs for each task. None if the job requested no CPUs."""
    gpus: int | None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> SlurmStep | None:
        if "SLURM_STEP_ID" not in environ:
            return None

        def number(name: str) -> int:
            return int(environ[f"SLURM_{name}"])

        def optional(name: str) -> int | None:
            return number(name) if f"SLURM_{name}" in environ else None

        try:
            offset = number("JOB_ID") + _PORTS_BETWEEN_STEPS * number("STEP_ID")
            return cls(
                nodes=expand_nodes(environ["SLURM_STEP_NODELIST"]),
                tasks=expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"]),
                node=number("NODEID"),
                task=number("PROCID"),
                local_task=number("LOCALID"),
                port=_FIRST_PORT + offset % _PORTS,
                cpus=optional("CPUS_PER_TASK"),
                gpus=optional("GPUS_ON_NODE"),
            )
        except (KeyError, ValueError) as error:
            raise LaunchError(
                f"SLURM_STEP_ID={environ['SLURM_STEP_ID']}, but srun's other variables are missing "
                f"or incomplete ({error!r}); start the script by srun, or unset SLURM_STEP_ID"
            ) from None

    def check_launchers(self) -> None:
        if any(count != 1 for count in self.tasks):
            raise LaunchError(
                f"srun started {sum(self.tasks)} times lockstep run on {len(self.nodes)} nodes;"
                " one lockstep run starts all processes of its node; srun --ntasks-per-node=1"
                " lockstep run, or srun python SCRIPT, which needs no launcher"
            )

    def variables(self, address: str) -> dict[str, str]:
        """Return RANK, WORLD_SIZE and the other variables that a launcher sets, if each task is a
        rank. `address` is the address of the first node."""
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
    """Expand Slurm's list of nodes: `a[1-2,05],b` is a1, a2, a05, b."""
    if re.fullmatch(r"(?:[^\[\],\s]|\[[\d,-]+\])+(?:,(?:[^\[\],\s]|\[[\d,-]+\])+)*", text) is None:
        raise ValueError(f"no list of nodes: {text!r}")
    return [name for each in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text) for name in _names(each)]


def _names(pattern: str) -> list[str]:
    before, bracket, rest = pattern.partition("[")
    if not bracket:
        return [pattern]
    numbers, _, after = rest.partition("]")
    names = []
    for each in numbers.split(","):
        first, _, last = each.partition("-")
        names += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return [f"{before}{number}{tail}" for number in names for tail in _names(after)]


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's list of counts: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for each in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each)
        if match is None:
            raise ValueError(f"no numbers of tasks: {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    state: str
    reason: str
    nodes: str
    restarts: int
    exit_status: int

    @classmethod
    def read(cls, text: str) -> JobState:
        """Read one line of `scontrol show job --oneliner`."""
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
        return 0 if self.state == "COMPLETED" else self.exit_status or 1

    def __str__(self) -> str:
        again = f" (restart {self.restarts})" if self.restarts else ""
        if self.has_ended:
            return f"has ended: {self.state}, exit status {self.exit_status}"
        if self.state == "RUNNING":
            return f"runs on {self.nodes}{again}"
        return f"is {self.state.lower()} ({self.reason}){again}"


POLL_SECONDS = 2.0


def submit(script: str) -> int:
    output = _ask(["sbatch", "--parsable"], stdin=script)
    return int(output.partition(";")[0])


def follow(job: int, name: str, say: Callable[[str], None], show: Callable[[str], None]) -> int:
    """Follow a job to its end. `say` gets each change of the job's state, and `show` gets each new
    line of the job's output. A line from a node's log begins with the name of the node."""
    read: dict[str, int] = {}
    before = None
    files = f"{name}-{job}"
    pattern = glob.escape(files)
    while True:
        state = JobState.read(_ask(["scontrol", "show", "job", "--oneliner", str(job)]))
        for path in (*glob.glob(f"{pattern}.txt"), *sorted(glob.glob(f"{pattern}-*.txt"))):
            node = path.removeprefix(files).removeprefix("-").removesuffix(".txt")
            read[path] = _show_new(path, read.get(path, 0), node, show, to_the_end=state.has_ended)
        if state != before:
            say(f"job {job} {state}")
        if state.has_ended:
            return state.status
        before = state
        time.sleep(POLL_SECONDS)


def _show_new(
    path: str, start: int, node: str, show: Callable[[str], None], *, to_the_end: bool
) -> int:
    with open(path, "rb") as file:
        file.seek(start)
        new = file.read()
    whole = len(new) if to_the_end else new.rfind(b"\n") + 1
    for line in new[:whole].decode(errors="replace").splitlines():
        show(f"{node}: {line}" if node else line)
    return start + whole


def machines_of(step: SlurmStep, options: LaunchOptions) -> Machines | None:
    step.check_launchers()
    count = len(step.nodes)
    if count == 1:
        return Machines.parse(options)
    host, source = address_of(step.nodes[0]), "the first node of the Slurm job,"
    return Machines(count, count, host, step.port, step.node, options.interface, source)


def set_task_variables(environ: MutableMapping[str, str]) -> None:
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return
    step = SlurmStep.read(environ)
    if step is not None and sum(step.tasks) > 1:
        for name, value in step.variables(address_of(step.nodes[0])).items():
            environ.setdefault(name, value)


def address_of(node: str) -> str:
    """Return the name of a node. Return Slurm's address if the name resolves to loopback, as it
    often does on the node."""
    address = _resolved(node)
    if address is not None and not ipaddress.ip_address(address).is_loopback:
        return node
    with suppress(LaunchError):
        output = _ask(["scontrol", "show", "node", "--oneliner", node])
        listed = re.search(r"\bNodeAddr=(\S+)", output)
        if listed is not None and _resolved(listed[1]) is not None:
            return listed[1]
    if address is None:
        raise LaunchError(
            f"the address of {node}, the first node of the Slurm job, cannot be found, even by"
            " scontrol; the nodes connect there; give --rdzv HOST:PORT with an address that all"
            " of them know"
        )
    return node


def _resolved(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _ask(line: list[str], stdin: str = "") -> str:
    try:
        ended = subprocess.run(line, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LaunchError(
            f"no program {line[0]} here; it is part of Slurm; run this where jobs are submitted"
        ) from None
    if ended.returncode != 0:
        raise LaunchError(
            f"{' '.join(line)} refused: {ended.stderr.strip()}; Slurm's message says what to"
            " correct"
        )
    return ended.stdout.strip()
