"""Calls of Slurm's programs: submit a job, follow it, find the address of a node. Does not import
torch."""

from __future__ import annotations

import glob
import ipaddress
import re
import socket
import subprocess
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress

from lockstep.base.errors import LaunchError
from lockstep.launch.machines import Machines
from lockstep.launch.slurm.batch_script import JobState, SlurmStep
from lockstep.options import LaunchOptions

POLL_SECONDS = 2.0


def submit(script: str) -> int:
    """Submit a batch script. Returns the job's number. Raises `LaunchError`."""
    said = _ask(["sbatch", "--parsable"], stdin=script)
    return int(said.partition(";")[0])


def follow(job: int, name: str, say: Callable[[str], None], show: Callable[[str], None]) -> int:
    """Follow a job to its end: `say` each change of its state, `show` each new line of its output.
    Returns `JobState.status`.

    Lines from a node's own file begin with its name. Raises `LaunchError` if Slurm no longer knows
    the job.
    """
    read: dict[str, int] = {}
    before = None
    files = f"{name}-{job}"
    while True:
        state = JobState.read(_ask(["scontrol", "show", "job", "--oneliner", str(job)]))
        for path in [
            *glob.glob(f"{glob.escape(files)}.txt"),
            *sorted(glob.glob(f"{glob.escape(files)}-*.txt")),
        ]:
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
    """Show the complete lines of a file from the offset `start` on. Returns the offset after
    them."""
    with open(path, "rb") as file:
        file.seek(start)
        new = file.read()
    whole = len(new) if to_the_end else new.rfind(b"\n") + 1
    for line in new[:whole].decode(errors="replace").splitlines():
        show(f"{node}: {line}" if node else line)
    return start + whole


def machines_of(step: SlurmStep, options: LaunchOptions) -> Machines | None:
    """The nodes of a Slurm step with one `lockstep run` on each; None for one node. Raises
    `LaunchError`."""
    step.check_launchers()
    count = len(step.nodes)
    if count == 1:
        return Machines.parse(options)
    host = address_of(step.nodes[0])
    return Machines(
        count,
        count,
        host,
        step.port,
        step.node,
        options.interface,
        "the first node of the Slurm job,",
    )


def set_task_variables(environ: MutableMapping[str, str]) -> None:
    """Set the variables that a launcher would set, if srun itself started this process as one of
    several."""
    step = (
        SlurmStep.read(environ) if "RANK" not in environ and "WORLD_SIZE" not in environ else None
    )
    if step is not None and sum(step.tasks) > 1:
        for name, value in step.variables(address_of(step.nodes[0])).items():
            environ.setdefault(name, value)


def address_of(node: str) -> str:
    """The address by which other nodes reach a node: its name, or Slurm's address if the name
    resolves to loopback here, as it often does on the node. Raises `LaunchError`.
    """
    found = _resolved(node)
    if found is not None and not ipaddress.ip_address(found).is_loopback:
        return node
    with suppress(LaunchError):
        listed = re.search(
            r"\bNodeAddr=(\S+)", _ask(["scontrol", "show", "node", "--oneliner", node])
        )
        if listed is not None and _resolved(listed[1]) is not None:
            return listed[1]
    if found is None:
        raise LaunchError(
            f"the address of {node}, the first node of the Slurm job, cannot be found, not by "
            "scontrol either; the nodes meet there; give --rdzv HOST:PORT with an address that "
            "all of them know"
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
            f"{' '.join(line)} refused: {ended.stderr.strip()}; Slurm's words say what to correct"
        )
    return ended.stdout.strip()
