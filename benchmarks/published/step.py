"""Time of a published step by the cost model: computation, what collectives add to it, and the
pipeline's bubble."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lockstep.planner.machines.costs import (
    FITTED,
    Fitted,
    collective_seconds,
    host_costs,
    operation_seconds,
)
from lockstep.planner.machines.hardware import Cluster, Device
from lockstep.planner.trace import DISPATCH, Collective, Operation
from published import transformer
from published.machines import cluster_of
from published.memory import fitting_checkpointing
from published.rows import Row
from published.software import Software, software_of

HALF = transformer.HALF
KERNELS = {"eager norm": 6, "eager rotation": 8, "eager activation": 2}
"""Kernels of an operation of the transformer's list, if more than one: RMSNorm and rotation by
their formulas."""
DISPATCHED = 40
"""Operations of a layer, forward or backward, on distributed tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Where a step's time goes. Seconds."""

    compute: float
    launches: float
    """Seconds that the device waits for its host, which launches kernels one after another."""
    tensor: float
    context: float
    data: float
    pipeline: float
    bubble: float
    update: float
    waiting: float

    @property
    def seconds(self) -> float:
        return sum(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Layer:
    """Times of one layer for one microbatch on one rank. Seconds."""

    forward: float
    backward: float
    """With what checkpointing computes again."""
    tensor: float
    context: float
    host: float
    """The host's time to launch all this."""

    @property
    def launches(self) -> float:
        return max(0.0, self.host - self.forward - self.backward - self.tensor - self.context)

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.tensor + self.context + self.launches


def predict(row: Row, fitted: Fitted = FITTED) -> Parts:
    """Return the step's time by its parts."""
    software, cluster = software_of(row), cluster_of(row)
    if not row.checkpointing or row.checkpointing.startswith("auto"):
        least = fitting_checkpointing(row, software, cluster.device.memory_bytes)
        row = replace(row, checkpointing=software.default_checkpointing or least)
    layer = layer_seconds(row, software, cluster, fitted)
    last = total(((each, 1.0) for each in transformer.head(row, software)), cluster.device, fitted)
    stage, mean = stage_seconds(row, layer, last)
    m = row.microbatches
    share = (
        layer.launches / layer.seconds,
        layer.tensor / layer.seconds,
        layer.context / layer.seconds,
    )
    compute = m * stage
    parts = Parts(
        compute=compute * (1 - sum(share)),
        launches=compute * share[0],
        tensor=compute * share[1],
        context=compute * share[2],
        data=data_seconds(row, software, cluster, layer, fitted),
        pipeline=pipeline_seconds(row, software, cluster, fitted),
        bubble=(row.pp - 1) / row.virtual * mean,
        update=total(
            ((each, 1.0) for each in transformer.update(row, software)), cluster.device, fitted
        )
        * row.updates,
        waiting=0.0,
    )
    return replace(parts, waiting=parts.seconds * fitted.jitter * math.log2(row.world))


def total(operations: Iterable[tuple[Operation, float]], device: Device, fitted: Fitted) -> float:
    """Return the time of operations, each with how often it runs; eager kernels move more than
    their list says."""
    return sum(
        times
        * operation_seconds(each, device, fitted)
        * (fitted.eager if each.name.startswith("eager") else 1.0)
        for each, times in operations
    )


def layer_seconds(row: Row, software: Software, cluster: Cluster, fitted: Fitted) -> Layer:
    """Return the times of one layer."""
    device = cluster.device
    ahead, back = transformer.forward(row, software), transformer.backward(row, software)
    repeated = transformer.recomputed(row, software, row.checkpointing)
    forward = total(
        ((each, 1.0) for each in ahead), device, fitted
    ) + software.launch_seconds * len(ahead)
    backward = total(
        ((each, 1.0) for each in back), device, fitted
    ) + software.launch_seconds * len(back)
    again = total(repeated, device, fitted) + software.launch_seconds * len(repeated)
    if software.sharding == 3 and row.shards > 1:
        copied = Operation("memory", row.dtype, 0, 14 * transformer.layer_parameters(row) // row.tp)
        backward += operation_seconds(copied, device, fitted)
    tensor = tensor_seconds(
        row, software, cluster, fitted, rounds=2 + (row.checkpointing.startswith("full"))
    )
    context = context_seconds(row, software, cluster, fitted)
    launched = [*ahead, *back, *(each for each, times in repeated if times)]
    return Layer(forward, backward + again, tensor, context, host_seconds(row, software, launched))


def host_seconds(row: Row, software: Software, operations: Sequence[Operation]) -> float:
    """Return the host's time for one layer, as `lockstep plan` counts it: kernels, DTensor's
    dispatch, FSDP's hooks.

    Nothing is counted for XLA and for CUDA graphs, which the host starts at once."""
    if software.name == "XLA" or "graph" in f"{row.compiled} {row.notes}".lower():
        return 0.0
    costs = host_costs(is_compiled=row.compiled.startswith("yes"))
    found = costs.kernel * sum(KERNELS.get(each.name, 1) for each in operations)
    if software.sharding == 3 and row.shards > 1:
        found += 3 * costs.collectives["shard"]
    if row.tp > 1:
        rounds = 3 if row.checkpointing.startswith("full") else 2
        found += 2 * rounds * costs.collectives["tensor"]
        if software.distributed_tensors and not row.compiled.startswith("yes"):
            found += rounds * DISPATCHED * costs.marks[DISPATCH]
    return found


def tensor_seconds(
    row: Row, software: Software, cluster: Cluster, fitted: Fitted, rounds: int
) -> float:
    """Return what tensor parallelism's collectives add to one layer: two sums a round, each round a
    pass."""
    if row.tp == 1:
        return 0.0
    whole = HALF * row.tokens * row.hidden
    kinds = ("all_gather", "reduce_scatter") if software.sequence_parallel else ("all_reduce",)
    times = [
        collective_seconds(Collective(kind, row.tp, 1, whole, "tensor"), cluster) for kind in kinds
    ]  # type: ignore[arg-type]
    again = times[0] if software.sequence_parallel and repeats_operations(row, software) else 0.0
    exposed_part = 1 - fitted.tensor_overlap if software.overlaps_tensor else 1.0
    return 2 * (rounds * software.launch_seconds + (rounds * sum(times) + again) * exposed_part)


def repeats_operations(row: Row, software: Software) -> bool:
    """True if checkpointing keeps some operations' results and repeats what leads to the others:
    also all-gathers."""
    kind = row.checkpointing
    if kind.startswith("selective") and "op" not in kind and "layer" not in kind:
        kind = software.half_checkpointing
    return kind == "matmuls" or (kind.startswith("selective") and "op" in kind)


def context_seconds(row: Row, software: Software, cluster: Cluster, fitted: Fitted) -> float:
    """Return what passing keys and values around adds to one layer; it runs beside attention."""
    if row.cp == 1:
        return 0.0
    block = HALF * 2 * row.tokens * row.head * row.kv_heads // row.tp
    once = (row.cp - 1) * collective_seconds(
        Collective("send", 2, row.tp, block, "context"), cluster
    )
    attention = [each for each in transformer.forward(row, software) if each.kind == "attention"]
    beside = total(((each, 1.0) for each in attention), cluster.device, fitted)
    return exposed(once, beside, fitted) + exposed(2 * once, 2.5 * beside, fitted)


def exposed(communication: float, computation: float, fitted: Fitted) -> float:
    """Return what a collective that runs beside computation adds to its time."""
    return max(0.0, communication - computation) + fitted.contention * min(
        communication, computation
    )


def stage_seconds(row: Row, layer: Layer, last: float) -> tuple[float, float]:
    """Return the time of a microbatch in the slowest stage, and in the mean one.

    The layers are spread evenly; where that needs it, embedding and output count as a layer each.
    If some stages have one more than others, the last one has not.
    """
    mean = row.layers / row.pp * layer.seconds + last / row.pp
    if row.pp == 1:
        return mean, mean
    uneven = row.layers % row.pp != 0
    own = uneven and (row.layers + 2) % row.pp == 0
    most = (row.layers + 2) // row.pp if own else math.ceil(row.layers / row.pp)
    return max(most * layer.seconds, (most - uneven) * layer.seconds + last), mean


def pipeline_seconds(row: Row, software: Software, cluster: Cluster, fitted: Fitted) -> float:
    """Return what messages between stages add: one forward and one back for each chunk and
    microbatch."""
    if row.pp == 1:
        return 0.0
    message = (
        HALF
        * row.tokens
        * row.hidden
        // (row.tp if software.sequence_parallel or software.scatters_messages else 1)
    )
    stride = row.world // row.pp
    once = collective_seconds(Collective("send", 2, stride, message, "pipeline"), cluster)
    messages = 2 * row.virtual * (row.microbatches + row.pp - 1)
    return messages * once * (fitted.contention if software.overlaps_pipeline else 1.0)


def data_seconds(
    row: Row, software: Software, cluster: Cluster, layer: Layer, fitted: Fitted
) -> float:
    """Return what reducing gradients and gathering parameters adds to the step."""
    if software.sharding == 3 and row.shards > 1:
        return sharded_seconds(row, software, cluster, layer, fitted)
    ranks = row.data * row.cp
    if ranks == 1:
        return 0.0
    local = transformer.parameters(row) // (row.tp * row.pp)

    def run(kind: str, width: int) -> float:
        return collective_seconds(Collective(kind, ranks, row.tp, width * local, "data"), cluster)  # type: ignore[arg-type]

    layers = row.layers / row.pp
    if software.sharding == 1:
        reduced, gathered = run("reduce_scatter", software.reduce_bytes), run("all_gather", HALF)
    else:
        reduced, gathered = run("all_reduce", software.reduce_bytes), 0.0
    if not software.overlaps_data:
        return reduced + gathered
    return exposed(reduced, layers * layer.backward, fitted) + exposed(
        gathered, layers * layer.forward, fitted
    )


def sharded_seconds(
    row: Row, software: Software, cluster: Cluster, layer: Layer, fitted: Fitted
) -> float:
    """Return what FSDP adds: parameters gathered before each pass, gradients scattered, and summed
    over replicas.

    A pipeline's stage keeps what it has gathered until the step's end, and gives its gradients away
    once.
    """
    size = transformer.layer_parameters(row) // row.tp
    outer = 2 * row.vocab * row.hidden // row.tp / size

    def run(kind: str, width: int, ranks: int, stride: int) -> float:
        return collective_seconds(Collective(kind, ranks, stride, width, "data"), cluster)  # type: ignore[arg-type]

    rounds = row.microbatches if row.pp == 1 else 1
    gather = run("all_gather", HALF * size, row.shards, row.tp)
    scatter = run("reduce_scatter", software.reduce_bytes * size, row.shards, row.tp)
    replicas = run(
        "all_reduce", software.reduce_bytes * size // row.shards, row.replicas, row.tp * row.shards
    )
    count = row.layers / row.pp
    once = exposed(gather, layer.forward + layer.tensor / 2, fitted)
    once += exposed(gather + scatter + replicas / rounds, layer.backward + layer.tensor / 2, fitted)
    ends = (2 * gather + scatter) * max(1.0, outer)
    return rounds * (count * once + ends)
