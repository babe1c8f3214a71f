"""Measures what `numerics=bitwise` costs under a plan.

    python benchmarks/bitwise.py [--plans replicate=1 pipeline=2 ...] [--rounds 5] [--steps 12]

`ls.train` trains examples/gpt.py's model under each plan, in `fast` and in `bitwise` numerics by
turns, so other load on the machine affects both. All ranks add up their processor time of a step;
the first two steps are left out. A line has the median of the rounds' ratios bitwise ÷ fast.
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

import lockstep as ls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

PLANS = ["replicate=1", "replicate=2", "pipeline=2", "pipeline=2,schedule=zero-bubble"]
LEFT_OUT = 2
CONTEXT = 64


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


def seconds(plan: str, steps: int, width: int) -> float:
    """Train under the plan. Return the processor time of all ranks. Runs on each rank."""
    torch.set_num_threads(1)
    windows = torch.randint(0, 256, (512, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    clock = Clock()
    recipe = ls.Recipe(
        model=lambda: gpt.GPT(layers=4, width=width, heads=4, context=CONTEXT, dropout=0.1),
        data=torch.utils.data.TensorDataset(windows),
        inputs=lambda batch: batch[0][:, :-1],
        loss=lambda logits, batch: gpt.cross_entropy(logits, batch[0]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        global_batch=32,
        microbatch=4,
        steps=steps,
        clip_norm=1.0,
        stages=["embedding", "blocks.*", "head"],
    )
    with tempfile.TemporaryDirectory() as folder:
        ls.train(recipe, plan=plan, run_dir=folder, hooks=[clock])
    return clock.total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    for plan in options.plans:
        processes = ls.Plan.parse(plan).sizes(1024)[0]
        ratios = []
        for _ in range(options.rounds):
            fast, bitwise = (
                ls.spawn(
                    seconds,
                    nproc=processes,
                    args=(f"{plan},numerics={numerics}", options.steps, options.width),
                )
                for numerics in ("fast", "bitwise")
            )
            ratios.append(bitwise / fast)
        print(
            f"{plan}: {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
