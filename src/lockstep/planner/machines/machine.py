"""The machines that plans are predicted on: devices, their costs, and their memory."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lockstep.plan import Plan
from lockstep.planner.machines.costs import FITTED, collective_seconds, operation_seconds
from lockstep.planner.machines.hardware import Cluster
from lockstep.planner.simulate import Costs, HostCosts
from lockstep.planner.trace import Collective

OVERHEAD_BYTES = 1_300_000_000
"""Memory of a GPU's driver context and libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Devices to plan for, with their costs."""

    cluster: Cluster
    costs: Costs
    capacity_bytes: int | None
    overhead_bytes: int
    is_gpu: bool = True
    contention: float = 0.0
    """Part of the communication beside computation that costs time all the same."""
    jitter: float = 0.0
    """Part of a step that each doubling of the devices adds."""

    @classmethod
    def of(cls, cluster: Cluster, memory_bytes: int | None) -> Machine:
        """Return the machine of data sheets. `memory_bytes`: of a device, unless the sheet's."""

        def collective(each: Collective) -> float:
            return collective_seconds(each, cluster)

        costs = Costs(
            lambda each: operation_seconds(each, cluster.device), collective, host_costs()
        )
        return cls(
            cluster=cluster,
            costs=costs,
            capacity_bytes=memory_bytes or cluster.device.memory_bytes,
            overhead_bytes=OVERHEAD_BYTES,
            contention=FITTED.contention,
            jitter=FITTED.jitter,
        )

    def costs_of(self, plan: Plan) -> Costs:
        return (
            replace(self.costs, host=host_costs(is_compiled=True))
            if self.is_gpu and plan.compile
            else self.costs
        )


@cache
def host_costs(*, is_compiled: bool = False) -> HostCosts:
    """Return a host's costs. `is_compiled`: without Python's and autograd's work for each
    operation."""
    sheet = tomllib.loads((Path(__file__).parent / "host.toml").read_text(encoding="utf-8"))
    launch, marks = sheet["launch"], dict[str, float](sheet["marks"])
    collectives = {axis: launch + seconds for axis, seconds in sheet["collectives"].items()}
    return HostCosts(launch if is_compiled else launch + sheet["kernel"], marks, collectives)
