"""The machines that plans are predicted on: devices, their costs, and their memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.plan import Plan
from lockstep.planner.machines.costs import FITTED, collective_seconds, operation_seconds
from lockstep.planner.machines.hardware import Cluster
from lockstep.planner.machines.host import host_costs
from lockstep.planner.operations import Collective
from lockstep.planner.simulate import Costs

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
