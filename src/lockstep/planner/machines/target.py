"""The devices that `--on` names: by data sheets, or this machine's accelerators."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lockstep.base.errors import PlanError, say
from lockstep.planner.machines.hardware import Cluster, is_known_device, known_devices, parse_target

THIS = re.compile(r"\s*(?:(\d+)\s*[x×*]\s*)?this\s*")


def devices_here(text: str) -> tuple[int, str] | None:
    """Return number and product name of this machine's accelerators that a target names; None if it
    names others. Raises `PlanError`."""
    match = THIS.fullmatch(text)
    if match is None:
        return None
    from lockstep.base import accelerator

    if not (found := accelerator.count()):
        unseen = accelerator.unseen(os.environ)
        raise PlanError(
            f"--on {text!r} is this machine's accelerators, and torch sees none"
            f'{f" ({unseen})" if unseen else ""}; name the devices to plan for: --on "1 x H100";'
            f" known: {', '.join(known_devices())}"
        )
    wanted, name = int(match[1] or found), accelerator.product_name()
    if not 1 <= wanted <= found:
        raise PlanError(
            f"--on {text!r}, and this machine has {found} ({name}); give --on '{found} x this', or"
            " the name of a device, such as --on '64 x H100'"
        )
    return wanted, name


def cluster_of(text: str) -> Cluster | int:
    """Return the devices of a target; their number alone if they are this machine's and no data
    sheet describes them. Raises `PlanError`."""
    here = devices_here(text)
    if here is None:
        return parse_target(text)
    return parse_target(f"{here[0]} x {here[1]}") if is_known_device(here[1]) else here[0]


def named(text: str, folder: Path) -> str:
    """Return the target, with this machine's accelerators named by their data sheet, or by one that
    is measured into `folder` now. Raises `PlanError`, `LaunchError`."""
    here = devices_here(text)
    if here is None:
        return text
    count, name = here
    if is_known_device(name):
        return f"{count} x {name}"
    from lockstep.planner.machines.measuring_gpu import write_gpu_sheets

    say(f"lockstep plan: no data sheet describes {name}; it is measured, as by doctor --write")
    path = folder / "this-machine.toml"
    write_gpu_sheets(path, count)
    return f"{count} x {path}"
