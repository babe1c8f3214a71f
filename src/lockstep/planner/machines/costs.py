"""Computes the time of kernels and collectives from data sheets. The factors in `fitted.toml` were
fitted to published trainings."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, inf, log2
from pathlib import Path
from typing import Any

from lockstep.plan import Plan
from lockstep.planner.machines.hardware import Cluster, Device
from lockstep.planner.simulate import Costs, HostCosts
from lockstep.planner.trace import ALIGNED, Collective, Operation, sent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    matmul: Mapping[str, float]
    """Rate of matrix products in a long run, relative to the best rate of the device. Heat and
    power slow down newer generations of GPUs more than older generations."""
    attention: float
    backward_attention: float
    memory: float
    inner: float
    """Inner dimension at which a matrix product runs at half of its rate."""
    waves: float
    """Fraction of the idle multiprocessors' time in the last wave of tiles that is lost."""
    misaligned: float
    """Rate of a matrix product whose rows are not a multiple of 16 bytes, relative to an aligned
    one."""
    misaligned_batch: float
    """Rate of unaligned batched matrix products, relative to aligned ones."""
    short_lines: float
    """Fraction of its rate that a matrix product loses each time that the alignment of its rows is
    halved, from 128 bytes down."""
    eager: float
    """Bytes that eager element-wise kernels move, relative to the bytes of their tensors."""
    contention: float
    tensor_overlap: float
    """Fraction of tensor parallelism's communication that overlaps with computation."""
    jitter: float
    """Fraction by which a step takes longer for each doubling of the number of devices."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The ratio of measured to predicted values is in this range for 80% of the measurements."""

    low: float
    high: float


def _sheet(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


FITTED = Fitted(**_sheet("fitted.toml")["fitted"])
INTERVALS = {kind: Interval(**each) for kind, each in _sheet("fitted.toml")["interval"].items()}
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.6),
)
ATTENTION_KEYS, ATTENTION_HEAD = 400, 32
"""Number of keys, and head dimension, at which fused attention runs at half of its rate."""
LOADED = 16
CONVOLUTION = 0.6
"""Rate of convolutions, relative to matrix products."""
OVERHEAD_BYTES = 1_300_000_000
"""Memory of a GPU's driver context and libraries."""


def operation_seconds(operation: Operation, device: Device, fitted: Fitted = FITTED) -> float:
    """Return the longer of compute time and memory time, but at least the time of a kernel
    launch."""
    bandwidth = device.memory_bytes_per_second * device.memory_fraction * fitted.memory
    arithmetic = _arithmetic_seconds(operation, device, fitted)
    return max(arithmetic, operation.bytes / bandwidth, device.launch_seconds)


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Return the time of a collective that shares its links with no other collective."""
    n = collective.ranks
    if n < 2:
        return 0.0
    near = max(1, min(n, cluster.devices_per_node // collective.stride))
    nodes = ceil(n / near)
    rounds = 2 if collective.kind == "all_reduce" else 1
    inside, between, latency = cluster.inside, cluster.between, 0.0
    if near > 1:
        latency += inside.latency_seconds + inside.hop_seconds * (near - 2)
    if nodes > 1:
        latency += between.latency_seconds + between.hop_seconds * log2(nodes)
    return latency * rounds / 2 + _moving_seconds(collective, cluster, near, nodes)


def _arithmetic_seconds(operation: Operation, device: Device, fitted: Fitted) -> float:
    if not operation.flops:
        return 0.0
    peak = device.peak_flops.get(operation.dtype, device.peak_flops["float32"])
    in_long_runs = fitted.matmul.get(device.generation, fitted.matmul["other"])
    best = peak * device.matmul_fraction * in_long_runs
    match operation.kind:
        case "matmul" if operation.shape:
            return operation.flops / (best * matmul_rate(operation, device, fitted))
        case "attention" if operation.shape:
            return operation.flops / (peak * _attention_rate(operation, device, fitted))
        case "convolution":
            return operation.flops / (best * CONVOLUTION)
        case _:
            return operation.flops / best


def matmul_rate(product: Operation, device: Device, fitted: Fitted = FITTED) -> float:
    *_, k = product.shape
    lost = fitted.waves * (1 / _filled(product.shape, device.multiprocessors) - 1)
    return k / (k + fitted.inner) / (1 + lost) * _aligned(product, fitted)


def _aligned(product: Operation, fitted: Fitted) -> float:
    if product.aligned_bytes < LOADED:
        return fitted.misaligned_batch if product.shape[0] > 1 else fitted.misaligned
    rate: float = (1 - fitted.short_lines) ** log2(ALIGNED / product.aligned_bytes)
    return rate


@cache
def _filled(shape: tuple[int, ...], multiprocessors: int) -> float:
    batch, m, n, _ = shape
    time = min(
        ceil(batch * ceil(m / a) * ceil(n / b) / multiprocessors) * a * b / rate
        for a, b, rate in TILES
    )
    return min(1.0, batch * m * n / multiprocessors / time)


def _attention_rate(operation: Operation, device: Device, fitted: Fitted) -> float:
    _, _, keys, head = operation.shape
    kernel = "cudnn" if "cudnn" in operation.name else "flash"
    direction = fitted.backward_attention if operation.phase == "backward" else 1.0
    shape = keys / (keys + ATTENTION_KEYS) * head / (head + ATTENTION_HEAD)
    shape = shape * (128 + ATTENTION_HEAD) / 128
    return device.attention_fraction[kernel] * fitted.attention * direction * min(1.0, shape)


def _moving_seconds(collective: Collective, cluster: Cluster, near: int, nodes: int) -> float:
    sent, (inside, between) = sent_bytes(collective), (cluster.inside, cluster.between)
    if nodes == 1:
        gain = inside.all_reduce_gain if collective.kind == "all_reduce" else 1.0
        return sent / inside.bandwidth / gain * (1 + inside.few_ranks / collective.ranks)
    if collective.kind == "all_to_all":
        away = sent * (collective.ranks - near) / (collective.ranks - 1)
        return max(away / between.bandwidth, (sent - away) / inside.bandwidth)
    width = 1 if collective.kind in ("broadcast", "send") else near
    return sent / min(inside.bandwidth if near > 1 else inf, width * between.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cluster: Cluster
    costs: Costs
    capacity_bytes: int | None
    overhead_bytes: int
    is_gpu: bool = True
    contention: float = 0.0
    jitter: float = 0.0

    @classmethod
    def of(cls, cluster: Cluster, memory_bytes: int | None) -> Machine:
        return cls(
            cluster=cluster,
            costs=Costs(
                partial(operation_seconds, device=cluster.device),
                partial(collective_seconds, cluster=cluster),
                host_costs(),
            ),
            capacity_bytes=memory_bytes or cluster.device.memory_bytes,
            overhead_bytes=OVERHEAD_BYTES,
            contention=FITTED.contention,
            jitter=FITTED.jitter,
        )

    def costs_of(self, plan: Plan) -> Costs:
        if self.is_gpu and plan.compile:
            return replace(self.costs, host=host_costs(is_compiled=True))
        return self.costs


@cache
def host_costs(*, is_compiled: bool = False) -> HostCosts:
    sheet = _sheet("host.toml")
    launch, marks = sheet["launch"], dict[str, float](sheet["marks"])
    collectives = {axis: launch + seconds for axis, seconds in sheet["collectives"].items()}
    return HostCosts(launch if is_compiled else launch + sheet["kernel"], marks, collectives)
