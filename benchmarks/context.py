"""Compares the speed of long sequences on one process and on several that share out each sequence.

    python benchmarks/context.py [--tokens 4096] [--processes 2] [--exchange keys heads]
        [--rounds 3] [--steps 6] [--json FILE]

Each side trains a causal language model (4 blocks of width 256, 4 heads, tied weights, no dropout)
with one sequence a step by `ls.train`. The first baseline is one process with one thread, since
each of the others has one; the second is one process with as many threads. Every round runs each
side once. A run's speed is that of its median step, without the first two. The ratio is the median
over the rounds of a side's tokens/s over those of the first baseline in the same round.

Quote numbers only from a machine that did nothing else.
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

WORDS, WIDTH, HEADS, BLOCKS = 256, 256, 4, 4
WARMUP = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        attended = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(tokens, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


class Times(ls.Hook):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_step(self, run: ls.Run) -> None:
        self.ends.append(time.perf_counter())


def measure(tokens: int, steps: int, plan: str) -> float:
    """Return the seconds of a step. Runs in each process."""
    data = torch.randint(WORDS, (steps, tokens), generator=torch.Generator().manual_seed(0))
    recipe = ls.Recipe(
        model=lambda: LanguageModel(tokens),
        data=list(data),
        inputs=lambda batch: batch,
        loss=lambda scores, batch: ls.Sum(
            F.cross_entropy(scores[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        ),
        weight=lambda batch: batch[:, 1:].numel(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        sequence=ls.Sequence() if "context" in plan else None,
        global_batch=1,
        steps=steps,
    )
    times = Times()
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        ls.train(recipe, plan=plan, hooks=[times], run_dir=folder)
    ends = times.ends[WARMUP - 1 :]
    return statistics.median(stop - start for start, stop in pairwise(ends))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--exchange", nargs="+", choices=("keys", "heads"), default=("keys", "heads")
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of each run (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    options = parser.parse_args()
    several = options.processes
    sides = {
        "1 process, 1 thread": (1, "replicate=1,threads=1"),
        f"1 process, {several} threads": (1, f"replicate=1,threads={several}"),
        **{
            f"context={several}, {exchange}": (
                several,
                f"context={several},exchange={exchange},threads=1",
            )
            for exchange in options.exchange
        },
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, (nproc, plan) in sides.items():
            args = (options.tokens, options.steps, plan)
            found[name].append(options.tokens / ls.spawn(measure, nproc=nproc, args=args))
    table = Table(title=f"{options.tokens} tokens a sequence, {os.cpu_count()} cores")
    for column in ("side", "tokens/s", "ratio", "quartiles"):
        table.add_column(column, justify="left" if column == "side" else "right", no_wrap=True)
    rows: list[dict[str, Any]] = []
    baseline = next(iter(found.values()))
    for name, rates in found.items():
        ratio = Ratio.of(rates, baseline)
        table.add_row(
            name,
            f"{statistics.median(rates):.0f}",
            f"{ratio.median:.2f}",
            f"{ratio.low:.2f}-{ratio.high:.2f}",
        )
        rows.append({"side": name, "tokens_per_second": rates, "ratio": ratio.median})
    Console().print(table)
    if options.json:
        content = {"cores": os.cpu_count(), "tokens": options.tokens, "rows": rows}
        Path(options.json).write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
