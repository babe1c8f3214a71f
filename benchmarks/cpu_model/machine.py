"""The costs of this machine's CPU: measured curves of seconds over size, for operations and
collectives between processes. `measuring.py` measures them, in the processes of a run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log

from lockstep.planner.machines.costs import Machine
from lockstep.planner.machines.hardware import Cluster, Device, Link
from lockstep.planner.simulate import Costs, HostCosts
from lockstep.planner.trace import Collective, CollectiveKind, Operation

SHARED_AXES = ("replicate", "shard", "expert", "context", "data")
"""The mesh axes whose collectives go through shared memory on one host."""
ALIKE: Mapping[CollectiveKind, CollectiveKind] = {
    "all_to_all": "all_gather",
    "broadcast": "all_gather",
    "send": "all_gather",
}
"""Collectives that are not measured on a route -> the one whose curve is taken."""
THIN = "thin matmul"
"""Name of the curve of what a matrix multiplication takes for its bytes, beside its arithmetic."""
LEAST_SECONDS = 1e-7
"""Least time of an operation."""
EVERY = "memory"
"""Name of the curve for operations that were not measured."""


@dataclass(frozen=True, slots=True)
class SecondsCurve:
    """Seconds over a size, through measured points: straight between them on logarithmic scales."""

    sizes: tuple[float, ...]
    """Rising."""
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, points: Mapping[float, float]) -> SecondsCurve:
        """The curve through (size -> seconds), where a point that is above a larger one is lowered
        to it: other load on the machine only adds."""
        sizes = sorted(points)
        seconds = list(accumulate((points[size] for size in reversed(sizes)), min))
        return cls(tuple(sizes), tuple(reversed(seconds)))

    def at(self, size: float) -> float:
        """Return the seconds at a size. Below the points it is the lowest; above them it grows with
        the size."""
        place = bisect_right(self.sizes, size)
        if place == 0:
            return self.seconds[0]
        if place == len(self.sizes):
            return self.seconds[-1] * size / self.sizes[-1]
        (low, high), (one, other) = (
            self.sizes[place - 1 : place + 1],
            self.seconds[place - 1 : place + 1],
        )
        return one * exp(log(other / one) * log(size / low) / log(high / low))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """This machine's costs in a run of some processes, which all compute at the same time."""

    processes: int
    threads: int
    """Intra-op threads of each process."""
    cores: int
    memory_bytes: int
    """Memory of the machine, or what its control group leaves, for all processes."""
    operations: Mapping[str, SecondsCurve]
    """Torch's name and dtype, such as `aten.mm float32` -> seconds over the floating-point
    operations, or over the bytes if it has none. `matmul float32`, `memory`: the curves of those of
    a kind that are not named."""
    around: Mapping[str, float]
    """Phase -> seconds of Python, autograd and views around each operation, less what it takes to
    time one."""
    collectives: Mapping[str, SecondsCurve]
    """Route, collective and number of ranks, such as `shared all_reduce 2` -> seconds over the full
    tensor's bytes."""
    exchanges: Mapping[str, float]
    """Mesh axis and number of ranks, such as `shard 2` -> seconds that Python, and waking the other
    ranks, add to each of its collectives in a run. `pipeline`: of a message, on each of its
    sides."""
    microbatch_seconds: float
    """Time that a microbatch takes beside its operations: loading, checks, random streams."""
    step_seconds: float
    """The same of a step: hooks, checks, metrics."""
    in_run: float = 1.0
    """Time of operations in a run to their time when measured alone: caches, fresh memory, waiting
    for slower ranks."""
    slice_seconds: float = 0.0
    """Time for which a process uses a core before another gets it, if there are more processes than
    cores."""

    def operation_seconds(self, operation: Operation) -> float:
        """Return the seconds of an operation, with what is around it."""
        curve, every = self._curve(operation), self.operations[EVERY]
        if operation.flops:
            seconds = max(curve.at(operation.flops), every.at(operation.bytes))
            seconds += (
                self.operations[THIN].at(operation.bytes) if operation.kind == "matmul" else 0.0
            )
        else:
            known = min(operation.bytes, curve.sizes[-1])
            seconds = curve.at(known) + every.at(operation.bytes) - every.at(known)
        return max(LEAST_SECONDS, seconds + self.around.get(operation.phase, 0.0)) * self.in_run

    def collective_seconds(self, collective: Collective) -> float:
        """Return the seconds of a collective, with what is around it."""
        if collective.ranks < 2:
            return 0.0
        route = "shared" if collective.axis in SHARED_AXES else "gloo"
        known = [
            int(name.split()[2])
            for name in self.collectives
            if name.startswith(f"{route} all_reduce ")
        ]
        ranks = min(known, key=lambda each: abs(each - collective.ranks))
        kind = (
            collective.kind
            if f"{route} {collective.kind} {ranks}" in self.collectives
            else ALIKE[collective.kind]
        )
        around = (
            0.0
            if collective.kind == "send"
            else self.exchanges.get(f"{collective.axis} {ranks}", 0.0)
        )
        return max(
            LEAST_SECONDS, self.collectives[f"{route} {kind} {ranks}"].at(collective.bytes) + around
        )

    def costs(self) -> Costs:
        """Return the costs for the simulation."""
        return Costs(
            self.operation_seconds,
            self.collective_seconds,
            is_synchronous=True,
            host=HostCosts(
                marks={"microbatch": self.microbatch_seconds, "end": self.step_seconds},
                collectives={"pipeline": self.exchanges.get("pipeline", 0.0)},
            ),
            processes=self.processes,
            cores=self.cores / self.threads,
            slice_seconds=self.slice_seconds,
        )

    def _curve(self, operation: Operation) -> SecondsCurve:
        names = (
            f"{operation.name} {operation.dtype}",
            f"{operation.name} float32",
            f"{operation.kind} {operation.dtype}",
        )
        return self.operations[
            next(
                (name for name in (*names, f"{operation.kind} float32") if name in self.operations),
                EVERY,
            )
        ]


def machine_of(measured: MeasuredMachine) -> Machine:
    """Return the machine that plans are predicted on."""
    device = Device(
        name="this machine",
        generation="other",
        peak_flops={},
        matmul_fraction=1.0,
        attention_fraction={},
        memory_bytes=measured.memory_bytes // measured.processes,
        memory_bytes_per_second=0.0,
        memory_fraction=1.0,
        launch_seconds=0.0,
        multiprocessors=measured.threads,
        devices_per_node=measured.processes,
        inside="memory",
        between="memory",
        source="measured here",
    )
    link = Link(
        name="memory",
        bytes_per_second=0.0,
        fraction=1.0,
        latency_seconds=0.0,
        hop_seconds=0.0,
        source="measured here",
    )
    return Machine(
        cluster=Cluster(device, measured.processes, measured.processes, link, link),
        costs=measured.costs(),
        capacity_bytes=device.memory_bytes,
        overhead_bytes=0,
        is_gpu=False,
    )
