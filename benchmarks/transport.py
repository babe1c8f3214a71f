"""Measures collectives through shared memory (`lockstep.comm.shared_memory`) beside Gloo in the
same processes.

    python benchmarks/transport.py [--nproc 2] [--operations all_reduce] [--rounds 9] [--json FILE]

One thread per process, fp32. In a round both sides run every operation and size once, in turn; a
turn is many calls, timed on rank 0 by the wall clock. Times are medians over the rounds, the ratio
is the median of the rounds' ratios, and beside it is their interquartile range. All ranks start
each call at the same time, unlike in most training: this is the cost of the exchange without
waiting for a slower rank.

Quote numbers only from a machine that did nothing else. With more processes than cores, ranks wait
for a processor on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import lockstep as ls
from lockstep.comm.segment import Unavailable
from lockstep.comm.shared_memory import SharedMemoryGroup

BYTES = (1 << 10, 16 << 10, 128 << 10, 800 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
TURN_BYTES = 64 << 20
MOST_CALLS = 200
SIDES = ("gloo", "shared")
# The names since torch 2.13, where the old ones warn.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def call_of(
    operation: str, side: str, group: SharedMemoryGroup, size_bytes: int
) -> Callable[[], object]:
    """A timed operation.

    `size_bytes`: bytes of the larger of input and output, rounded up to a multiple of the ranks.
    """
    length = -(-size_bytes // 4 // group.size)
    whole, other, part = (
        torch.zeros(length * group.size),
        torch.zeros(length * group.size),
        torch.zeros(length),
    )
    sizes = [length] * group.size
    gloo: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: reduce_scatter(part, whole),
        "all_gather": lambda: all_gather(whole, part),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, sizes, sizes),
    }
    shared: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "reduce_scatter": lambda: group.reduce_scatter(part, whole),
        "all_gather": lambda: group.all_gather(whole, part),
        "broadcast": lambda: group.broadcast(whole, 0),
        "all_to_all": lambda: group.all_to_all(other, whole, sizes, sizes),
    }
    return {"gloo": gloo, "shared": shared}[side][operation]


def seconds(call: Callable[[], object], size_bytes: int) -> float:
    """Return the mean seconds of a call in one turn."""
    calls = max(3, min(MOST_CALLS, TURN_BYTES // size_bytes))
    for _ in range(2):
        call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def measure(operations: list[str], rounds: int) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Measure both sides in one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = SharedMemoryGroup.create()
    if isinstance(group, Unavailable):
        raise SystemExit(f"these processes share no memory: {group.reason}")
    times: dict[tuple[str, int], dict[str, list[float]]] = {}
    with group:
        for operation in operations:
            for size_bytes in BYTES:
                calls = {side: call_of(operation, side, group, size_bytes) for side in SIDES}
                found = times[operation, size_bytes] = {side: [] for side in SIDES}
                for turn in range(rounds):
                    for side in SIDES[turn % 2 :] + SIDES[: turn % 2]:
                        found[side].append(seconds(calls[side], size_bytes))
        dist.barrier()
    dist.destroy_process_group()
    return times


def row_of(
    operation: str, size_bytes: int, nproc: int, found: dict[str, list[float]]
) -> dict[str, Any]:
    ratios = [gloo / shared for gloo, shared in zip(found["gloo"], found["shared"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "operation": operation,
        "processes": nproc,
        "bytes": size_bytes,
        "gloo_milliseconds": 1e3 * statistics.median(found["gloo"]),
        "shared_milliseconds": 1e3 * statistics.median(found["shared"]),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
    }


def show(rows: list[dict[str, Any]], nproc: int, rounds: int) -> None:
    table = Table(
        title=f"{nproc} processes of 1 thread, {os.cpu_count()} cores, median of {rounds} rounds"
    )
    for column in ("operation", "size", "Gloo (ms)", "shared (ms)", "ratio", "quartiles"):
        table.add_column(column, justify="left" if column == "operation" else "right", no_wrap=True)
    for row in rows:
        size = (
            f"{row['bytes'] >> 20} MiB" if row["bytes"] >= 1 << 20 else f"{row['bytes'] >> 10} KiB"
        )
        times = (f"{row['gloo_milliseconds']:.3f}", f"{row['shared_milliseconds']:.3f}")
        table.add_row(
            row["operation"],
            size,
            *times,
            f"{row['ratio']:.1f}",
            f"{row['ratio_low']:.1f}-{row['ratio_high']:.1f}",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--operations",
        nargs="+",
        choices=OPERATIONS,
        default=["all_reduce"],
        help="default: all_reduce",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="rounds; both sides run once in each (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    times = ls.spawn(measure, nproc=options.nproc, args=(options.operations, options.rounds))
    rows = [
        row_of(operation, size_bytes, options.nproc, found)
        for (operation, size_bytes), found in times.items()
    ]
    show(rows, options.nproc, options.rounds)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"rounds": options.rounds, "load_before": load, "rows": rows}, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
