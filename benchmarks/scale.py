"""Measures one rank of a very large world: set-up time, memory and time per step, beside a world of
16.

    python benchmarks/scale.py [--sizes 16 1024 16384] [--rounds 5] [--json FILE]

The other ranks are torch's fake process group: it answers every collective at once, as if all ranks
had sent the same. So this is the cost of lockstep and torch on each rank, without the network. The
model is an MLP (784-256-10) with 4 samples per rank and AdamW: its steps take about a millisecond,
so any overhead shows. The plans are `replicate` alone, and with `shard=8`. Each measurement is a
process of its own; figures are medians over rounds.

Set-up is the time from `ls.train` to the first step, without torch's creation of meshes and process
groups, which has its own column. Memory is the process's peak after all steps. A step is the mean
of 300, so that logging counts.

Quote numbers only from a machine that did nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed import device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.training.reducers import ddp as replicate

PLANS = {"replicate": "transport=torch", "shard": "shard=8,replicate=auto,transport=torch"}
WARMUP, STEPS = 20, 300
SAMPLES_A_RANK = 4
FIGURES = ("setup_seconds", "groups_seconds", "memory_mib", "step_ms")


class Replicated(DistributedDataParallel):
    """Give DDP a result for its own all-reduce, which the fake group cannot give."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


class Clock(ls.Hook):
    def __init__(self) -> None:
        self.began = time.perf_counter()

    def on_start(self, run: ls.Run) -> None:
        self.set_up = time.perf_counter()

    def after_step(self, run: ls.Run) -> None:
        if run.step == WARMUP:
            self.warm = time.perf_counter()
        self.ended = time.perf_counter()


def timed(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            into.append(time.perf_counter() - began)

    return wrapped


def measure(size: int, plan: str) -> dict[str, float]:
    """Measure rank 0 of `size` ranks, in a process of its own."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    replicate.DistributedDataParallel = Replicated
    groups: list[float] = []
    device_mesh.init_device_mesh = timed(device_mesh.init_device_mesh, groups)
    device_mesh.DeviceMesh._flatten = timed(device_mesh.DeviceMesh._flatten, groups)
    samples = 2**17
    recipe = ls.Recipe(
        model=lambda: nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
        data=TensorDataset(torch.randn(samples, 784), torch.randint(0, 10, (samples,))),
        inputs=lambda batch: batch[0],
        loss=lambda logits, batch: F.cross_entropy(logits, batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        global_batch=SAMPLES_A_RANK * size,
        microbatch=SAMPLES_A_RANK,
        steps=WARMUP + STEPS,
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        ls.train(recipe, plan=plan, run_dir=f"{folder}/run", hooks=[clock])
    return {
        "setup_seconds": clock.set_up - clock.began - sum(groups),
        "groups_seconds": sum(groups),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "step_ms": (clock.ended - clock.warm) / STEPS * 1e3,
    }


def measured(size: int, plan: str) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--one", str(size), plan]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(rows: list[dict[str, Any]], rounds: int) -> None:
    table = Table(
        title=f"one rank, median of {rounds} rounds; in brackets: times that of the smallest world"
    )
    for column in ("plan", "ranks", "set-up, s", "torch's groups, s", "memory, MiB", "step, ms"):
        table.add_column(column, justify="left" if column == "plan" else "right", no_wrap=True)
    for row in rows:
        cells = [
            f"{row[name]:.2f}"
            + ("" if name == "groups_seconds" else f" ({row['ratio'][name]:.2f})")
            for name in FIGURES
        ]
        table.add_row(row["plan"], str(row["ranks"]), *cells)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[16, 1024, 16384],
        help="ranks, multiples of 8; default: %(default)s",
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(int(arguments.one[0]), arguments.one[1])))
        return
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for name, plan in PLANS.items():
            for size in arguments.sizes:
                found.setdefault((name, size), []).append(measured(size, plan))
    rows = []
    for (name, size), each in found.items():
        row = {figure: statistics.median(one[figure] for one in each) for figure in FIGURES}
        first = next((other for other in rows if other["plan"] == name), row)
        rows.append(
            {
                "plan": name,
                "ranks": size,
                **row,
                "ratio": {figure: row[figure] / (first[figure] or 1.0) for figure in FIGURES},
            }
        )
    show(rows, arguments.rounds)
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"rows": rows, "torch": torch.__version__}, indent=1)
        )


if __name__ == "__main__":
    main()
