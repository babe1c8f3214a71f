"""The devices that `--on` names: a data sheet's, this machine, or a measured machine in a file."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

from lockstep.base.control_group import usable_cpus
from lockstep.base.errors import PlanError
from lockstep.launch.environment import threads_per_process
from lockstep.planner.machines.hardware import parse_target
from lockstep.planner.machines.machine import Machine
from lockstep.planner.machines.this_machine import MeasuredMachine, machine_of

THIS = re.compile(r"\s*(?:(\d+)\s*[x×*]\s*)?this\s*")
MOST_PROCESSES = 64


def processes_here(text: str) -> int | None:
    """Return the number of processes on this machine that a target names; None if it names other
    devices. Raises `PlanError`."""
    match = THIS.fullmatch(text)
    if match is None:
        return None
    processes = usable_cpus() if match[1] is None else int(match[1])
    if not 1 <= processes <= MOST_PROCESSES:
        raise PlanError(
            f"--on {text!r}; it is a number of processes on this machine, 1 to {MOST_PROCESSES}, as"
            " in '2 x this'"
        )
    return processes


def written(text: str, folder: Path) -> str:
    """Return the text of a target. If it names this machine, that is measured and written to a
    file, whose path is then the text. Raises `PlanError`."""
    processes = processes_here(text)
    if processes is None:
        return text
    from lockstep.planner.machines.calibration import measure_machine, refuse_gpus  # imports torch

    refuse_gpus(text)

    path = folder / "this-machine.toml"
    path.write_text(
        measure_machine(processes, threads_per_process(processes)).as_toml(), encoding="utf-8"
    )
    return str(path)


def machine_at(text: str, memory_bytes: int | None) -> Machine:
    """Return the machine of a target that `written` returned, or that was measured before.
    `memory_bytes`: of a device, if not all of it may be used. Raises `PlanError`."""
    if not text.endswith(".toml") or " x " in text:
        return Machine.of(parse_target(text), memory_bytes)
    try:
        told = Path(text).read_text(encoding="utf-8")
        if "operations" not in tomllib.loads(told):
            return Machine.of(parse_target(text), memory_bytes)
        machine = machine_of(MeasuredMachine.from_toml(told))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PlanError(
            f"--on {text!r} cannot be read: {error}; give a file that lockstep doctor --write has"
            " written"
        ) from error
    return machine if memory_bytes is None else replace(machine, capacity_bytes=memory_bytes)
