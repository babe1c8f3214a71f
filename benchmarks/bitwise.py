"""Compares the processor time of numerics=bitwise with slices and without, on one process.

    python benchmarks/bitwise.py [--widths 256 512] [--slices 2 8] [--rounds 5] [--steps 8]
        [--json FILE]

Each side trains a causal language model (2 blocks, 8 heads, 256 words, tokens in microbatches of
512) by `ls.train`, on one thread. Every round runs each side once, in turn. A run's figure is the
processor time of its median step, without the first two. The ratio is the median over the rounds of
a side's time over that of the side without slices in the same round. Processor time is used because
other processes change it less than time.
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
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls

WORDS, HEADS, BLOCKS, TOKENS, MICROBATCHES = 256, 8, 2, 128, 2
WARMUP = 2
STYLES = {
    **dict.fromkeys(["*.query", "*.key", "*.value", "*.up"], "colwise"),
    **dict.fromkeys(["*.out", "*.down"], "rowwise"),
    "words": "embedding",
    "head": "vocabulary",
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_width = width // HEADS

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        heads = (
            layer(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class LanguageModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clock(ls.Hook):
    """Notes the processor time after each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_step(self, run: Any) -> None:
        self.times.append(time.process_time())


def entropy(logits: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def seconds_a_step(width: int, slices: int, steps: int, folder: Path) -> float:
    clock = Clock()
    generator = torch.Generator().manual_seed(0)
    recipe = ls.Recipe(
        model=lambda: LanguageModel(width),
        data=torch.randint(WORDS, (64, TOKENS + 1), generator=generator),
        inputs=lambda batch: batch[:, :-1],
        loss=entropy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        global_batch=4 * MICROBATCHES,
        microbatch=4,
        steps=steps,
        clip_norm=1.0,
        tensor=STYLES,
    )
    with redirect_stderr(io.StringIO()):
        ls.train(
            recipe,
            plan=f"replicate=1,numerics=bitwise,slices={slices}",
            run_dir=folder,
            hooks=[clock],
        )
    return statistics.median(after - before for before, after in pairwise(clock.times[WARMUP:]))


def measure(width: int, slices: list[int], rounds: int, steps: int) -> dict[str, Any]:
    found: dict[int, list[float]] = {count: [] for count in (1, *slices)}
    for _ in range(rounds):
        for count, seconds in found.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds.append(seconds_a_step(width, count, steps, Path(folder)))
    ratios = {
        count: [each / plain for each, plain in zip(seconds, found[1], strict=True)]
        for count, seconds in found.items()
        if count != 1
    }
    return {"width": width, "seconds": found, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--slices", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    table = Table("width", "slices", "processor time a step", "÷ without slices (median; all)")
    rows = []
    for width in options.widths:
        row = measure(width, options.slices, options.rounds, options.steps)
        rows.append(row)
        for count, seconds in row["seconds"].items():
            ratios = sorted(row["ratios"].get(count, []))
            said = (
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
                if ratios
                else ""
            )
            table.add_row(str(width), str(count), f"{statistics.median(seconds):.3f} s", said)
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
