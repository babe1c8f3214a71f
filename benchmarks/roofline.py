"""Computes lower bounds of a step's time (arithmetic, memory, gradient exchange) on this machine,
beside `ls.train`'s time.

    python benchmarks/roofline.py [--only mlp wide gpt] [--processes 1 2]
        [--steps 300] [--json FILE]

First all processes measure at the same time what each of them has: products of 1024 x 1024 matrices
(FLOP/s), `b.add_(a)` on 64 MiB (bytes read and written per second), and an all-reduce of the
model's gradient size, as a run does it. Then `ls.train` runs; its median step counts.

Arithmetic: the matrix products of a forward and a backward, as torch's FlopCounterMode counts them.
Memory: weights, gradients and AdamW's two moments, 4 bytes per weight each. The weights are read by
the forward, the backward and the optimizer, and written; the gradient is written, read for its
norm, and read by the optimizer; the moments are read and written: 11 passes. Activations are not
counted. A process does one after the other, so the bound is the sum. The rest of a step is Python,
kernel launches, reading samples, and activations.

Quote numbers only from a machine that did nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import lockstep as ls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

PASSES = 11
"""Passes over 4 bytes per weight in a step."""
SIDE = 1024
COPIED_BYTES = 64 * 2**20
WARMUP = 20
CASES = ("mlp", "wide", "gpt")


@dataclass(frozen=True)
class Work:
    build: Callable[[], nn.Module]
    data: Any
    inputs: Callable[[Any], Tensor]
    loss: Callable[[Tensor, Any], Tensor]
    batch: int


def perceptron(features: int, width: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes))


def work(case: str) -> Work:
    if case == "gpt":
        data = gpt.Windows(gpt.read_text()[0], 128)
        build = partial(gpt.GPT, layers=4, width=128, heads=4, context=128, dropout=0.0)
        return Work(build, data, lambda batch: batch[:, :-1], gpt.cross_entropy, 16)
    features, width, classes, batch = {"mlp": (784, 256, 10, 64), "wide": (1024, 4096, 1024, 32)}[
        case
    ]
    rows = TensorDataset(torch.randn(8192, features), torch.randint(classes, (8192,)))
    build = partial(perceptron, features, width, classes)
    return Work(
        build,
        rows,
        lambda batch: batch[0],
        lambda output, batch: F.cross_entropy(output, batch[1]),
        batch,
    )


def fastest(call: Callable[[], object], repeats: int = 7) -> float:
    """Return seconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times[1:])


class Measured(ls.Hook):
    """Measures this process's speed while it trains, and the time of its steps."""

    def __init__(self, flops: float) -> None:
        self.flops = flops
        self.times: list[float] = []
        self.bounds: dict[str, float] = {}

    def after_step(self, run: ls.Run) -> None:
        if run.step == WARMUP:
            self.bounds = self.measure(run)
        self.times.append(time.perf_counter())

    def measure(self, run: ls.Run) -> dict[str, float]:
        """Return the lower bounds in seconds of a step: arithmetic, memory, exchange."""
        weights = sum(parameter.numel() for parameter in run.model.parameters())
        left, right, out = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE), torch.empty(SIDE, SIDE)
        product = fastest(lambda: torch.mm(left, right, out=out)) / (2 * SIDE**3)
        first, second = torch.zeros(COPIED_BYTES // 4), torch.zeros(COPIED_BYTES // 4)
        moved = fastest(lambda: second.add_(first)) / (3 * COPIED_BYTES)
        gradient = torch.zeros(weights)
        exchange = fastest(lambda: run.context.mesh.data.all_reduce(gradient))
        size = run.context.world.size
        return {
            "compute": self.flops / size * product,
            "memory": PASSES * 4 * weights * moved,
            "exchange": exchange if size > 1 else 0.0,
        }

    def step_seconds(self) -> float:
        times = self.times[WARMUP:]
        return statistics.median(after - before for before, after in pairwise(times))


def flops_of(made: Work) -> float:
    """Return the FLOPs of one process's step."""
    model = made.build()
    rows = list(range(made.batch))
    batch = (
        made.data[rows] if isinstance(made.data, TensorDataset) else made.data.__getitems__(rows)
    )
    with FlopCounterMode(display=False) as counter:
        made.loss(model(made.inputs(batch)), batch).backward()
    return float(counter.get_total_flops())


def measured(case: str, steps: int, plan: str = "") -> dict[str, float]:
    """Return the seconds of a step: the lower bounds and the measured time. Runs in each
    process."""
    made = work(case)
    seen = Measured(flops_of(made))
    recipe = ls.Recipe(
        model=made.build,
        data=made.data,
        inputs=made.inputs,
        loss=made.loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        global_batch=made.batch,
        steps=WARMUP + steps,
        clip_norm=1.0,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        redirect_stderr(nowhere),
    ):
        ls.train(recipe, plan=plan, run_dir=f"{folder}/run", hooks=[seen])
    return {**seen.bounds, "step": seen.step_seconds()}


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"milliseconds of a step, {os.cpu_count()} cores")
    for column in (
        "case",
        "processes",
        "compute",
        "memory",
        "exchange",
        "bound",
        "step",
        "bound / step",
    ):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for row in rows:
        times = [
            f"{1e3 * row[name]:.2f}" for name in ("compute", "memory", "exchange", "bound", "step")
        ]
        table.add_row(
            row["case"], str(row["processes"]), *times, f"{row['bound'] / row['step']:.2f}"
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--processes", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    options = parser.parse_args()
    rows = []
    for case in options.only:
        for size in options.processes:
            os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // size))
            found = ls.spawn(measured, nproc=size, args=(case, options.steps))
            bound = found["compute"] + found["memory"] + found["exchange"]
            rows.append({"case": case, "processes": size, **found, "bound": bound})
    show(rows)
    if options.json:
        Path(options.json).write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
