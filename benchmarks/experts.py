"""Compares the speed of a mixture of experts with divided and with whole experts, and with and
without a balance loss over the global batch.

    python benchmarks/experts.py [--tokens 512] [--width 256] [--processes 2]
        [--rounds 5] [--steps 8] [--json FILE]

Each side trains a causal language model (4 blocks of 8 experts, 2 for each token, of which each has
as many hidden features as twice the width; no dropout) by `ls.train`, with two microbatches a
process and step, and one thread a process. `expert` is compared with `replicate` on as many
processes, and `Balance(over="step")` with no balance on one process. Every round runs each side
once. A run's time is that of its median step, without the first two: wall time, and processor time
of all processes together, which hardly depends on other load of the machine. The ratio is the
median over the rounds of a side's time over its baseline's in the same round.

Quote wall times only from a machine that did nothing else.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from contextlib import redirect_stderr
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from peers.figures import Ratio
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls

WORDS, HEADS, BLOCKS, EXPERTS, CHOSEN = 256, 4, 4, 8, 2
LENGTH, MICROBATCHES, WARMUP = 128, 2, 2


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in index.unique().tolist():
            row, choice = (index == expert).nonzero(as_tuple=True)
            computed = F.silu(tokens[row] @ self.up[expert]) @ self.down[expert]
            output = output.index_add(0, row, computed * weights[row, choice, None])
        return output


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.second_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.router, self.experts = nn.Linear(width, EXPERTS, bias=False), Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        attended = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        tokens = self.second_norm(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(CHOSEN)
        return x + self.experts(tokens, index, weights).view_as(x)


class LanguageModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Side:
    """A way to train the model. `baseline`: the name of the side with which it is compared."""

    nproc: int
    plan: str
    balance: ls.Balance | None
    baseline: str


class Times(ls.Hook):
    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def after_step(self, run: ls.Run) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))


def measure(folder: str, side: Side, tokens: int, width: int, steps: int) -> None:
    """Write the wall and processor seconds of a step to a file. Runs in each process."""
    samples = tokens // LENGTH
    batch = samples * MICROBATCHES * side.nproc
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(WORDS, (batch * steps, LENGTH + 1), generator=generator)
    recipe = ls.Recipe(
        model=lambda: LanguageModel(width),
        data=list(data),
        inputs=lambda batch: batch[:, :-1],
        loss=lambda logits, batch: F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        balance=side.balance,
        global_batch=batch,
        microbatch=samples,
        steps=steps,
    )
    times = Times()
    with tempfile.TemporaryDirectory() as run_dir, redirect_stderr(io.StringIO()):
        ls.train(recipe, plan=side.plan, hooks=[times], run_dir=f"{run_dir}/run")
    steps_of_each = zip(*times.ends[WARMUP - 1 :], strict=True)
    medians = [
        statistics.median(stop - start for start, stop in pairwise(ends)) for ends in steps_of_each
    ]
    Path(folder, os.environ.get("RANK", "0")).write_text(json.dumps(medians))


def timed(side: Side, *args: int) -> tuple[float, float]:
    """Return the wall seconds of a step, and the processor seconds of all processes."""
    with tempfile.TemporaryDirectory() as folder:
        ls.spawn(measure, nproc=side.nproc, args=(folder, side, *args))
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    return max(wall for wall, _ in found), sum(processor for _, processor in found)


def sides(processes: int) -> dict[str, Side]:
    balance = ls.Balance(coefficient=0.01, over="step")
    replicas, alone, full = f"replicate={processes}", "one process", "one process, full"
    recomputing = "replicate=1,threads=1,checkpointing=full"
    return {
        replicas: Side(processes, f"{replicas},threads=1", None, replicas),
        f"expert={processes}": Side(processes, f"expert={processes},threads=1", None, replicas),
        alone: Side(1, "replicate=1,threads=1", None, alone),
        f"{alone}, balance": Side(1, "replicate=1,threads=1", balance, alone),
        full: Side(1, recomputing, None, full),
        f"{full}, balance": Side(1, recomputing, balance, full),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512, help="of a microbatch")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each run (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    options = parser.parse_args()
    compared = sides(options.processes)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in compared}
    for _ in range(options.rounds):
        for name, side in compared.items():
            found[name].append(timed(side, options.tokens, options.width, options.steps))
    columns = ["side", "wall ms", "ratio", "quartiles", "processor ms", "ratio", "quartiles"]
    table = Table(title=f"{options.tokens} tokens, width {options.width}, {os.cpu_count()} cores")
    for column in columns:
        table.add_column(column, justify="left" if column == "side" else "right", no_wrap=True)
    rows: list[dict[str, Any]] = []
    for name, side in compared.items():
        cells, row = [name], {"side": name, "baseline": side.baseline}
        own_times = list(zip(*found[name], strict=True))
        baselines = list(zip(*found[side.baseline], strict=True))
        for kind, own, baseline in zip(("wall", "processor"), own_times, baselines, strict=True):
            ratio = Ratio.of(own, baseline)
            cells += [
                f"{1000 * statistics.median(own):.0f}",
                f"{ratio.median:.2f}",
                f"{ratio.low:.2f}-{ratio.high:.2f}",
            ]
            row |= {f"{kind}_seconds": own, f"{kind}_ratio": ratio.median}
        table.add_row(*cells)
        rows.append(row)
    Console(width=120).print(table)
    if options.json:
        content = {"cores": os.cpu_count(), "tokens": options.tokens, "rows": rows}
        Path(options.json).write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
