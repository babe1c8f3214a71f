"""Measures what `--recompute-every` costs, and that it raises no alarm.

    python benchmarks/recompute.py [--nproc 2] [--microbatches 4] [--rounds 40] [--width 256]
    python benchmarks/recompute.py --clean 10000 [--nproc 3]

`ls.train` trains examples/gpt.py's model under replicate and numerics=bitwise, with a check in
every fourth step. Steps with and without a check alternate within one run, so other load on the
machine affects both. Rank 0 measures the processor time of the training thread. The cost at K = 50
is (the median of the steps with a check ÷ the median of the others - 1) ÷ 50; a check recomputes
one microbatch, so 1 ÷ `microbatches` ÷ 50 is expected.

`--clean STEPS` trains a tiny model for as many steps, with a check in each; a WrongResultError ends
it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep as ls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

EVERY = 4
CONTEXT = 64


class Clock(ls.Hook):
    """Processor seconds of each step."""

    def __init__(self) -> None:
        self.with_check: list[float] = []
        self.without: list[float] = []
        self._began = 0.0

    def before_step(self, run: Any) -> None:
        self._began = time.thread_time()

    def after_step(self, run: Any) -> None:
        took = time.thread_time() - self._began
        checked = (run.step - 1) % EVERY == 0
        (self.with_check if checked else self.without).append(took)


def cost(run_dir: str, width: int, microbatches: int, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a step with a check, and of one without. Runs on each rank."""
    torch.set_num_threads(1)
    windows = torch.randint(0, 256, (512, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    clock = Clock()
    processes = int(os.environ["WORLD_SIZE"])
    ls.train(
        ls.Recipe(
            model=lambda: gpt.GPT(layers=4, width=width, heads=4, context=CONTEXT, dropout=0.1),
            data=torch.utils.data.TensorDataset(windows),
            inputs=lambda batch: batch[0][:, :-1],
            loss=lambda logits, batch: gpt.cross_entropy(logits, batch[0]),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
            global_batch=4 * microbatches * processes,
            microbatch=4,
            steps=EVERY * (rounds + 2),
        ),
        run_dir=run_dir,
        plan=f"replicate={processes},numerics=bitwise",
        hooks=[clock],
    )
    return statistics.median(clock.with_check[2:]), statistics.median(clock.without[6:])


def clean(run_dir: str, steps: int) -> str:
    """Train a tiny model with a check in each step. Runs on each rank."""
    torch.set_num_threads(1)
    rows = torch.randn(4096, 9, generator=torch.Generator().manual_seed(0))
    processes = int(os.environ["WORLD_SIZE"])
    result = ls.train(
        ls.Recipe(
            model=lambda: nn.Sequential(
                nn.Linear(8, 16),
                nn.Dropout(0.1),
                nn.Tanh(),
                nn.Linear(16, 1),
            ),
            data=torch.utils.data.TensorDataset(rows),
            inputs=lambda batch: batch[0][:, :8],
            loss=lambda output, batch: nn.functional.mse_loss(output, batch[0][:, 8:]),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            global_batch=8 * processes,
            microbatch=4,
            steps=steps,
        ),
        run_dir=run_dir,
        plan=f"replicate={processes},numerics=bitwise",
    )
    return result.fingerprint


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4, help="of each process, in a step")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--clean", type=int, metavar="STEPS")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        if options.clean is not None:
            os.environ["LOCKSTEP_RECOMPUTE_EVERY"] = "1"
            found = ls.spawn(clean, nproc=options.nproc, args=(f"{folder}/run", options.clean))
            print(f"no alarm in {options.clean} steps; fingerprint {found}")
            return
        os.environ["LOCKSTEP_RECOMPUTE_EVERY"] = str(EVERY)
        sizes = (options.width, options.microbatches, options.rounds)
        checked, plain = ls.spawn(cost, nproc=options.nproc, args=(f"{folder}/run", *sizes))
    ratio = checked / plain
    print(
        f"{options.nproc} processes, load before {load:.1f}: a step {1e3 * plain:.1f} ms; with a"
        f" check {ratio:.3f} of it (1 + 1/{options.microbatches} expected); at K = 50:"
        f" {(ratio - 1) / 50:.2%}"
    )


if __name__ == "__main__":
    main()
