"""Trains a GPT whose activations are most of its memory, and takes memory away after step 2."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from models import Fault, recipe
from results import CPU

import lockstep as ls

FOLDER = Path(os.environ["GPU_CHECK_OOM"])
SIZE = {"layers": 12, "width": 512, "heads": 8, "context": 1024, "vocabulary": 256}


class Scarce(Fault):
    """In a new process, memory is short from the start."""

    limit = FOLDER / "limit"

    def take(self) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(int(self.limit.read_text()) / total)

    def on_start(self, run: ls.Run) -> None:
        if not CPU and self.limit.exists():
            self.take()

    def after_step(self, run: ls.Run) -> None:
        if not CPU and self.is_now(run) and not self.limit.exists():
            self.limit.write_text(str(int(0.6 * torch.cuda.max_memory_reserved())))
            self.take()


if __name__ == "__main__":
    given = recipe(size=SIZE, global_batch=16, microbatch=16, steps=5, precision="bf16", samples=64)
    hooks = [Scarce(step=2, rank=0)]
    ls.train(given, run_dir=FOLDER / "run", hooks=hooks, log_every=1, saving=ls.Saving(every=1))
