"""Time of an operation on a device (a roofline with tiles) and of a collective (latency and
bandwidth).

A rate is the data sheet's peak, times the part that the best kernel reaches (`hardware.py`), times
what was fitted (`fitted.toml`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, log2
from pathlib import Path

from lockstep.planner.machines.hardware import Cluster, Device, Link
from lockstep.planner.trace import ALIGNED, Collective, Operation, sent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Rates in a training step that data sheets do not give."""

    matmul: Mapping[str, float]
    """Rate of matrix products in a long run to the data sheet's best, by generation: heat and power
    hold newer devices back more. `other`: any other."""
    attention: float
    """Rate of fused attention to the data sheet's."""
    backward_attention: float
    """Rate of attention's backward to its forward."""
    memory: float
    """Rate of kernels that move bytes to a plain copy's."""
    inner: float
    """Inner dimension at which a product runs at half its rate."""
    waves: float
    """Part of a partly filled last wave of tiles that is lost in fact."""
    misaligned: float
    """Rate of a product whose rows are no multiple of 16 bytes."""
    misaligned_batch: float
    """The same of a batch of products, as in attention that is not fused."""
    short_lines: float
    """Part of a product's rate lost for each halving below 128 of the bytes that divide its
    rows."""
    eager: float
    """Bytes that eager element-wise kernels move to those in their list."""
    contention: float
    """Part of a collective beside computation that still costs time."""
    tensor_overlap: float
    """Part of tensor parallelism's collectives that overlapping software hides."""
    jitter: float
    """Part of a step that each doubling of the devices adds, waiting for the slowest."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Measured over predicted, for 80% of a source's rows, made without this source."""

    low: float
    high: float


def load_fitted(
    path: Path = Path(__file__).parent / "fitted.toml",
) -> tuple[Fitted, dict[str, Interval]]:
    """Return the fitted numbers, and intervals of `seconds` and `memory`."""
    sheet = tomllib.loads(path.read_text(encoding="utf-8"))
    return Fitted(**sheet["fitted"]), {
        kind: Interval(**each) for kind, each in sheet["interval"].items()
    }


FITTED, INTERVALS = load_fitted()
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.6),
)
"""Sizes of tiles, and a multiprocessor's rate on each."""
ATTENTION_KEYS, ATTENTION_HEAD = 400, 32
"""Keys, and head dimension, at which fused attention runs at half its rate."""
LOADED = 16
"""A thread loads so many bytes at once, and rows of other multiples in pieces."""
CONVOLUTION = 0.6
"""Rate of convolutions to matrix products'."""


def operation_seconds(operation: Operation, device: Device, fitted: Fitted = FITTED) -> float:
    """Return the longer of an operation's arithmetic and bytes, at least a kernel's launch."""
    moving = operation.bytes / (
        device.memory_bytes_per_second * device.memory_fraction * fitted.memory
    )
    return max(_arithmetic_seconds(operation, device, fitted), moving, device.launch_seconds)


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Return the time of a collective, alone on its links, among ranks that run it together.

    Ranks of a node follow each other. A group with several ranks in each node uses all their
    adapters, as rings and trees do.
    """
    n = collective.ranks
    if n < 2:
        return 0.0
    near = max(1, min(n, cluster.devices_per_node // collective.stride))
    nodes = ceil(n / near)
    rounds = 2 if collective.kind == "all_reduce" else 1
    inside = (
        cluster.inside.latency_seconds + cluster.inside.hop_seconds * (near - 2)
        if near > 1
        else 0.0
    )
    between = (
        cluster.between.latency_seconds + cluster.between.hop_seconds * log2(nodes)
        if nodes > 1
        else 0.0
    )
    return (inside + between) * rounds / 2 + _moving_seconds(collective, cluster, near, nodes)


def _arithmetic_seconds(operation: Operation, device: Device, fitted: Fitted) -> float:
    if not operation.flops:
        return 0.0
    peak = device.peak_flops.get(operation.dtype, device.peak_flops["float32"])
    best = (
        peak * device.matmul_fraction * fitted.matmul.get(device.generation, fitted.matmul["other"])
    )
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
    """Return a product's rate to the best shape's, at most 1."""
    *_, k = product.shape
    lost = fitted.waves * (1 / _filled(product.shape, device.multiprocessors) - 1)
    return k / (k + fitted.inner) / (1 + lost) * _aligned(product, fitted)


def _aligned(product: Operation, fitted: Fitted) -> float:
    """Return a product's rate by the power of two that divides its rows' bytes: cores load 16 at
    once, memory 128."""
    if product.aligned_bytes < LOADED:
        return fitted.misaligned_batch if product.shape[0] > 1 else fitted.misaligned
    rate: float = (1 - fitted.short_lines) ** log2(ALIGNED / product.aligned_bytes)
    return rate


@cache
def _filled(shape: tuple[int, ...], multiprocessors: int) -> float:
    """Return the part of the multiprocessors' time that the best tiles fill."""
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
    shape = (
        keys
        / (keys + ATTENTION_KEYS)
        * head
        / (head + ATTENTION_HEAD)
        * (128 + ATTENTION_HEAD)
        / 128
    )
    return device.attention_fraction[kernel] * fitted.attention * direction * min(1.0, shape)


def _moving_seconds(collective: Collective, cluster: Cluster, near: int, nodes: int) -> float:
    sent = sent_bytes(collective)
    if nodes == 1:
        gain = cluster.inside.all_reduce_gain if collective.kind == "all_reduce" else 1.0
        return (
            sent
            / _bandwidth(cluster.inside)
            / gain
            * (1 + cluster.inside.few_ranks / collective.ranks)
        )
    if collective.kind == "all_to_all":
        away = sent * (collective.ranks - near) / (collective.ranks - 1)
        return max(away / _bandwidth(cluster.between), (sent - away) / _bandwidth(cluster.inside))
    width = 1 if collective.kind in ("broadcast", "send") else near
    return sent / min(
        _bandwidth(cluster.inside) if near > 1 else float("inf"),
        width * _bandwidth(cluster.between),
    )


def _bandwidth(link: Link) -> float:
    return link.bytes_per_second * link.fraction
