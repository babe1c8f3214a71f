"""Measures time and memory for 4,096 positions of an order, beside torch's DistributedSampler where
its list fits in memory.

    python benchmarks/order.py [--json FILE] [--repeats 7]

The sides alternate; times are medians. A sampler builds the list of an epoch when the epoch starts.
`first` is the wait for its first 4,096 samples, `each` the time for 4,096 samples on average over
the whole epoch. Memory is the peak that Python and numpy allocated; torch.randperm needs 8 more
bytes per sample. `DistributedSampler` is timed as one rank in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DistributedSampler

from lockstep.order import Order

POSITIONS = 4096
LENGTHS = (10**6, 10**7, 10**9, 10**12)
LONGEST_LIST = 10**7
Side = tuple[Callable[[], object], Callable[[], object], float]
"""A function for the first 4,096 samples, one for `share` times 4,096 samples, and 1 / share."""


def sides() -> dict[tuple[int, str], Side]:
    found: dict[tuple[int, str], Side] = {}
    for length in LENGTHS:
        found[length, "lockstep"] = order(length)
        if length <= LONGEST_LIST:
            found[length, "DistributedSampler"] = sampler(length)
    return found


def order(length: int) -> Side:
    made = Order(length, seed=0)
    positions = np.arange(POSITIONS) + length // 2

    def chunk() -> object:
        return made.samples(positions)

    return chunk, chunk, 1.0


def sampler(length: int) -> Side:
    made: DistributedSampler[int] = DistributedSampler(range(length), num_replicas=1, rank=0)  # type: ignore[arg-type]
    return lambda: list(islice(made, POSITIONS)), lambda: list(made), POSITIONS / length


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure(repeats: int) -> list[dict[str, Any]]:
    every = sides()
    times: dict[tuple[int, str], list[tuple[float, float]]] = {name: [] for name in every}
    for first, _, _ in every.values():
        first()
    for _ in range(repeats):
        for name, (first, whole, share) in every.items():
            times[name].append((seconds(first), seconds(whole) * share))
    return [
        {
            "samples": length,
            "side": side,
            "first_milliseconds": (
                1e3 * statistics.median(first for first, _ in times[length, side])
            ),
            "each_milliseconds": 1e3 * statistics.median(each for _, each in times[length, side]),
            "peak_bytes": peak_bytes(every[length, side][0]),
        }
        for length, side in every
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the figures to this file"
    )
    parser.add_argument(
        "--repeats", type=int, default=7, help="measurements of each side; the median counts"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.repeats)
    table = Table(title=f"{POSITIONS} positions, median of {arguments.repeats}")
    for column in ("samples", "side", "first (ms)", "each (ms)", "peak (MB)"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for row in rows:
        numbers = (
            f"{row['first_milliseconds']:.3f}",
            f"{row['each_milliseconds']:.3f}",
            f"{row['peak_bytes'] / 1e6:.3f}",
        )
        table.add_row(f"10^{len(str(row['samples'])) - 1}", row["side"], *numbers)
    Console().print(table)
    if arguments.json:
        report = {"positions": POSITIONS, "repeats": arguments.repeats, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
