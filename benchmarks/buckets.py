"""Compares DDP's bucket sizes: that of all buckets, and that of the first one, which is sent early
in the backward.

    python benchmarks/buckets.py [--only wide gpt] [--sizes 1 5 25 100] [--first 0.25 1 4]
        [--rounds 5] [--json FILE]

Two processes of one thread run `ls.train` with `transport=torch`: Gloo over the loopback.
(Processes that share memory use no buckets.) Every round tries each size once, in a run of its own,
in rotating order. A run's speed is that of its median step; the table has the median over the
rounds. torch's defaults are 25 MiB, and 1 MiB for the first bucket.

Quote numbers only from a machine that did nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from roofline import measured

import lockstep as ls

USUAL = 25.0
"""MiB: torch's default."""


def measure(case: str, size: float, first: float, steps: int) -> float:
    """Return the seconds of a step. Runs in each process."""
    import lockstep.training.reducers.ddp as replicate

    if first == size:  # as torch does if a size is given
        replicate.DistributedDataParallel = partial(
            replicate.DistributedDataParallel, bucket_cap_mb=size
        )
    else:
        dist._DEFAULT_FIRST_BUCKET_BYTES = int(first * 2**20)
    return measured(case, steps, plan="transport=torch")["step"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=("wide", "gpt"), default=("wide", "gpt"))
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=float,
        default=(1, 5, 25, 100),
        help="MiB, of the first bucket too (default: %(default)s)",
    )
    parser.add_argument(
        "--first",
        nargs="+",
        type=float,
        default=(0.25, 1, 4),
        help="MiB of the first bucket; the others have 25 (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=40, help="steps of each run (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    tried = [
        *((size, size) for size in options.sizes),
        *((USUAL, first) for first in options.first),
    ]
    rows: list[dict[str, Any]] = []
    for case in options.only:
        seconds: dict[tuple[float, float], list[float]] = {each: [] for each in tried}
        for turn in range(options.rounds):
            for each in tried[turn % len(tried) :] + tried[: turn % len(tried)]:
                seconds[each].append(ls.spawn(measure, nproc=2, args=(case, *each, options.steps)))
        table = Table(
            title=f"{case}, 2 processes, {os.cpu_count()} cores, median of {options.rounds} rounds"
        )
        for column in ("bucket (MiB)", "first (MiB)", "steps/s", "quartiles"):
            table.add_column(column, justify="right", no_wrap=True)
        for (size, first), found in seconds.items():
            rates = [1 / each for each in found]
            low, _, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else rates * 3
            rows.append(
                {"case": case, "bucket_mib": size, "first_mib": first, "steps_per_second": rates}
            )
            table.add_row(
                f"{size:g}",
                f"{first:g}",
                f"{statistics.median(rates):.2f}",
                f"{low:.2f}-{high:.2f}",
            )
        Console().print(table)
    if options.json:
        Path(options.json).write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
