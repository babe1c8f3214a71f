"""The host's time in a step on GPUs, measured by `benchmarks/planner_host.py`."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from lockstep.planner.simulate import HostCosts


@cache
def host_costs(*, is_compiled: bool = False) -> HostCosts:
    """Return a host's costs. `is_compiled`: without Python's and autograd's work for each
    operation."""
    sheet = tomllib.loads((Path(__file__).parent / "host.toml").read_text(encoding="utf-8"))
    launch, marks = sheet["launch"], dict[str, float](sheet["marks"])
    collectives = {axis: launch + seconds for axis, seconds in sheet["collectives"].items()}
    return HostCosts(launch if is_compiled else launch + sheet["kernel"], marks, collectives)
