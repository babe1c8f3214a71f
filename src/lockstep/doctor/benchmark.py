"""Measures the bandwidth of collectives, the bandwidth and latency between ranks, and the offsets
of the machines' clocks.

Algorithm bandwidth is the size of the array divided by the time. Bus bandwidth is defined as in
nccl-tests (doc/PERFORMANCE.md).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
import torch.distributed as dist

from lockstep.base import accelerator
from lockstep.doctor.collective_checks import RankGroup, exchange
from lockstep.doctor.coordination import ProbeCoordinator
from lockstep.doctor.expected_results import COLLECTIVES, Collective
from lockstep.doctor.point_to_point import Pair, PairMeasurement, find_outliers, schedule_pairs

SIZES_BYTES = (2**10, 2**16, 2**20, 2**24, 2**28)
LARGEST_BYTES_ON_CPU = 2**24
SIZE_SECONDS = 0.06
MOST_REPEATS = 20
LONGEST_SECONDS = 1.0
"""An array size is skipped if a call would take longer than this."""
PINGS = 20
TRANSFER_SECONDS = 0.02
TRANSFERS = 3
FIRST_BYTES = 2**16
MEASUREMENTS = 5
"""Number of measurements of a pair of ranks with an outlying result. The best measurement
counts."""

_PARTITIONING = ("scatter", "gather", "all-gather", "reduce-scatter", "all-to-all")


def bus_bandwidth(collective: str, size_bytes: int, seconds: float, ranks: int) -> float:
    factor = 1.0
    if collective == "all-reduce":
        factor = 2 * (ranks - 1) / ranks
    elif collective in _PARTITIONING:
        factor = (ranks - 1) / ranks
    return size_bytes / seconds * factor


def time_collectives(coordinator: ProbeCoordinator, group: RankGroup) -> list[dict[str, Any]]:
    """Time all collectives on arrays of several sizes. All ranks must call this function. A time is
    the median on the slowest rank."""
    rows = []
    for collective in COLLECTIVES:
        seconds: float | None = None
        for size_bytes in (0,) if collective == "barrier" else _sizes(group.device):
            if seconds is not None and seconds * 16 > LONGEST_SECONDS:
                break
            with coordinator.probe(f"{collective} of {size_bytes} bytes"):
                seconds = _time_collective(coordinator, group, collective, size_bytes)
            ranks = len(group.global_ranks)
            row: dict[str, Any] = {
                "collective": collective,
                "size_bytes": size_bytes,
                "seconds": seconds,
            }
            row |= dict.fromkeys(("algorithm_bandwidth", "bus_bandwidth"))
            if size_bytes:
                row["algorithm_bandwidth"] = size_bytes / seconds
                row["bus_bandwidth"] = bus_bandwidth(collective, size_bytes, seconds, ranks)
            rows.append(row)
    return rows


def _time_collective(
    coordinator: ProbeCoordinator, group: RankGroup, collective: Collective, size_bytes: int
) -> float:
    size = len(group.global_ranks)
    count = max(size, size_bytes // 4 // size * size)
    own = torch.zeros(
        count // size if collective in ("gather", "all-gather") else count, device=group.device
    )

    def once() -> float:
        accelerator.synchronize(group.device)
        began = time.perf_counter()
        exchange(collective, own, group)
        accelerator.synchronize(group.device)
        return time.perf_counter() - began

    once()  # warm-up: the first call creates connections and buffers
    repeats = int(coordinator.all_gather(max(2, min(MOST_REPEATS, int(SIZE_SECONDS / once()))))[0])
    times = []
    for _ in range(repeats):
        dist.barrier(group=group.process_group)
        times.append(once())
    return max(float(each) for each in coordinator.all_gather(statistics.median(times)))


def _sizes(device: torch.device) -> list[int]:
    most = SIZES_BYTES[-1] if accelerator.is_accelerator(device) else LARGEST_BYTES_ON_CPU
    return [size for size in SIZES_BYTES if size <= most]


def measure_pairs(
    coordinator: ProbeCoordinator,
    group: RankGroup,
    machine_of_rank: Sequence[int],
    machines: Sequence[str],
    kind: Callable[[Pair], str],
) -> list[PairMeasurement]:
    """Measure the links between all pairs of ranks. All ranks must call this function."""
    best: dict[Pair, PairMeasurement] = {}
    rounds = schedule_pairs(machine_of_rank)
    for _ in range(MEASUREMENTS):
        for new in _measure_rounds(coordinator, group, rounds, kind):
            pair = new.sender, new.receiver
            old = best.get(pair, new)
            best[pair] = replace(
                new,
                latency_seconds=min(new.latency_seconds, old.latency_seconds),
                bytes_per_second=max(new.bytes_per_second, old.bytes_per_second),
            )
        outliers = find_outliers(best.values(), machines)
        suspects = {tuple(sorted(pair)) for outlier in outliers for pair in outlier.pairs}
        rounds = [[pair for pair in pairs if pair in suspects] for pairs in rounds]
        rounds = list(filter(None, rounds))
        if not rounds:
            break
    return [best[pair] for pair in sorted(best)]


def _measure_rounds(
    coordinator: ProbeCoordinator,
    group: RankGroup,
    rounds: Sequence[Sequence[Pair]],
    kind: Callable[[Pair], str],
) -> list[PairMeasurement]:
    own = []
    for pairs in rounds:
        names = ", ".join(f"{one} and {other}" for one, other in pairs[:4])
        with coordinator.probe(f"send/recv between ranks {names}"):
            for pair in pairs:
                if group.group_rank in pair:
                    own += _measure_both_directions(group, pair, kind(pair))
            coordinator.barrier()
    with coordinator.probe("gathering the point-to-point measurements"):
        gathered = coordinator.all_gather([astuple(each) for each in own])
    return [PairMeasurement(*each) for part in gathered for each in part]


def _measure_both_directions(group: RankGroup, pair: Pair, kind: str) -> list[PairMeasurement]:
    """Measure as the sender, and answer as the receiver. Return the measurements of this rank."""
    measured = []
    for sender, receiver in (pair, pair[::-1]):
        peer = receiver if group.group_rank == sender else sender
        if group.group_rank != sender:
            _serve(group, peer)
            continue
        latency = _ping(group, peer) / 2
        count, seconds = FIRST_BYTES, _transfer(group, peer, FIRST_BYTES)
        while seconds < TRANSFER_SECONDS and count < _sizes(group.device)[-1]:
            count *= 4
            seconds = _transfer(group, peer, count)
        seconds = min(seconds, *(_transfer(group, peer, count) for _ in range(TRANSFERS - 1)))
        _send_count(group, peer, 0)
        rate = count / max(seconds - 2 * latency, seconds / 2)
        measured.append(PairMeasurement(sender, receiver, latency, rate, kind))
    return measured


def _ping(group: RankGroup, peer: int) -> float:
    times = []
    for _ in range(PINGS):
        began = time.perf_counter()
        _send_count(group, peer, 1)
        _receive(group, peer, 1)
        times.append(time.perf_counter() - began)
    return min(times)


def _transfer(group: RankGroup, peer: int, count: int) -> float:
    content = torch.zeros(count, dtype=torch.uint8, device=group.device)
    _send_count(group, peer, count)
    _receive(group, peer, 1)
    began = time.perf_counter()
    dist.send(content, peer)
    _receive(group, peer, 1)
    return time.perf_counter() - began


def _serve(group: RankGroup, peer: int) -> None:
    """Receive and acknowledge messages from `peer`, until `peer` sends a size of 0."""
    while count := int(_receive(group, peer, 8).view(torch.int64)[0]):
        content = torch.empty(count, dtype=torch.uint8, device=group.device)
        _acknowledge(group, peer)
        if count > 1:
            dist.recv(content, peer)
            accelerator.synchronize(group.device)
            _acknowledge(group, peer)


def _send_count(group: RankGroup, peer: int, count: int) -> None:
    dist.send(torch.tensor([count], device=group.device).view(torch.uint8), peer)


def _acknowledge(group: RankGroup, peer: int) -> None:
    dist.send(torch.zeros(1, dtype=torch.uint8, device=group.device), peer)


def _receive(group: RankGroup, peer: int, count: int) -> torch.Tensor:
    content = torch.empty(count, dtype=torch.uint8, device=group.device)
    dist.recv(content, peer)
    accelerator.synchronize(group.device)
    return content


def measure_clocks(
    coordinator: ProbeCoordinator, group: RankGroup, first_ranks: Sequence[int]
) -> list[tuple[float, float]]:
    """Return the offset of each machine's clock from the first machine's clock, with its
    uncertainty. All ranks must call this function."""
    own = (0.0, 0.0)
    reference = first_ranks[0]
    for first in first_ranks[1:]:
        with coordinator.probe(f"the clock of rank {first}'s machine"):
            if group.group_rank == first:
                offsets = [_clock_offset(reference) for _ in range(PINGS)]
                own = min(offsets, key=lambda measured: measured[1])
            elif group.group_rank == reference:
                for _ in range(PINGS):
                    dist.recv(torch.empty(1, dtype=torch.float64), first)
                    dist.send(torch.tensor([time.time()], dtype=torch.float64), first)
            coordinator.barrier()
    with coordinator.probe("gathering the clock offsets"):
        gathered = coordinator.all_gather(own)
    return [(float(gathered[first][0]), float(gathered[first][1])) for first in first_ranks]


def _clock_offset(reference: int) -> tuple[float, float]:
    reference_time = torch.zeros(1, dtype=torch.float64)
    before, began = time.time(), time.perf_counter()
    dist.send(reference_time, reference)
    dist.recv(reference_time, reference)
    half = (time.perf_counter() - began) / 2
    return before + half - float(reference_time[0]), half
