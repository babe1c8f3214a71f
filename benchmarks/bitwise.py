"""Measures what `numerics=bitwise` costs under a plan, and what slices cost.

    python benchmarks/bitwise.py [--plans replicate=1 pipeline=2 ...] [--slices 2 8]
        [--widths 256 512] [--rounds 5] [--steps 12]

`ls.train` trains a model under two plans by turns, so other load on the machine affects both. All
ranks add up their processor time of a step; the first two steps are left out. A line has the median
of the rounds' ratios, the least and the greatest.

`--plans`: examples/gpt.py's model under each plan, bitwise ÷ fast. `--slices`: on one process,
bitwise with slices ÷ bitwise without, of a language model with sharded heads and microbatches of
512 tokens, for each of the widths. Give either without a value to leave it out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

PLANS = ["replicate=1", "replicate=2", "pipeline=2", "pipeline=2,schedule=zero-bubble"]
LEFT_OUT = 2
CONTEXT = 64
WORDS, HEADS, TOKENS = 256, 8, 128
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
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clock(ls.Hook):
    """Processor seconds of all ranks in the steps that count."""

    def __init__(self) -> None:
        self.total = 0.0
        self._seconds = 0.0
        self._began = 0.0

    def before_step(self, run: Any) -> None:
        self._began = time.process_time()

    def after_step(self, run: Any) -> None:
        if run.step > LEFT_OUT:
            self._seconds += time.process_time() - self._began

    def on_finish(self, run: Any) -> None:
        seconds = torch.tensor([self._seconds])
        if dist.is_initialized():
            dist.all_reduce(seconds)
        self.total = float(seconds)


def of_gpt(width: int) -> dict[str, Any]:
    return {
        "model": lambda: gpt.GPT(layers=4, width=width, heads=4, context=CONTEXT, dropout=0.1),
        "data": windows(CONTEXT),
        "global_batch": 32,
        "stages": ["embedding", "blocks.*", "head"],
    }


def of_sharded_heads(width: int) -> dict[str, Any]:
    return {
        "model": lambda: LanguageModel(width),
        "data": windows(TOKENS),
        "global_batch": 8,
        "tensor": STYLES,
    }


def windows(tokens: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randint(0, WORDS, (512, tokens + 1), generator=generator)
    )


def seconds(model: Any, plan: str, steps: int, width: int) -> float:
    """Train under the plan. Return the processor time of all ranks. Runs on each rank."""
    torch.set_num_threads(1)
    clock = Clock()
    recipe = ls.Recipe(
        inputs=lambda batch: batch[0][:, :-1],
        loss=lambda logits, batch: gpt.cross_entropy(logits, batch[0]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        microbatch=4,
        steps=steps,
        clip_norm=1.0,
        **model(width),
    )
    with tempfile.TemporaryDirectory() as folder:
        ls.train(recipe, plan=plan, run_dir=folder, hooks=[clock])
    return clock.total


def compare(model: Any, plan: str, beside: str, width: int, options: argparse.Namespace) -> str:
    """Return the ratios of the processor times under a plan and under the one beside it."""
    processes = ls.Plan.parse(plan).sizes(1024)[0]
    ratios = []
    for _ in range(options.rounds):
        base, found = (
            ls.spawn(seconds, nproc=processes, args=(model, each, options.steps, width))
            for each in (beside, plan)
        )
        ratios.append(found / base)
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plans", nargs="*", default=PLANS)
    parser.add_argument("--slices", nargs="*", type=int, default=[2, 8])
    parser.add_argument("--widths", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    for plan in options.plans:
        plans = f"{plan},numerics=bitwise", f"{plan},numerics=fast"
        print(f"{plan}: {compare(of_gpt, *plans, 256, options)}", flush=True)
    for width in options.widths:
        for count in options.slices:
            beside = "replicate=1,numerics=bitwise"
            ratios = compare(of_sharded_heads, f"{beside},slices={count}", beside, width, options)
            print(f"slices={count}, width {width}: {ratios}", flush=True)


if __name__ == "__main__":
    main()
