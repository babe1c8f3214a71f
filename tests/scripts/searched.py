"""A training with hyper-parameters, for tests of searches: fits a line."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

parser = argparse.ArgumentParser()
parser.add_argument("--trouble", default="", help="a kind for each trial from 1 on: crash,,kill")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--seconds", type=float, default=0.0, help="that each step takes besides")
parser.add_argument("--meet", type=Path, help="a folder; a trial trains once two have come there")
options = parser.parse_args()

lr = ls.param("lr", 0.1, low=1e-3, high=1.0, log=True)
width = ls.param("width", 2, choices=[1, 2, 4])
if options.trouble == "rank" and os.environ.get("RANK") == "1":
    ls.param("momentum", 0.5)
if options.trouble == "syntax":
    raise NameError("a name that is not there")
trial = Path(os.environ.get("LOCKSTEP_RUN_DIR", "")).name.partition("trial-")[2]
trouble = dict(enumerate(options.trouble.split(","), 1)).get(int(trial or 0), "")
if trouble != "hang":
    os.environ.pop("LOCKSTEP_HANG_AFTER", None)  # a busy machine may be slower
if trouble == "crash":
    raise ValueError(f"lr {lr}")

generator = torch.Generator().manual_seed(0)
x = torch.randn(64, 4, generator=generator)
y = x @ torch.tensor([1.0, -2.0, 3.0, 0.5])


def meet(folder: Path) -> None:
    """Wait for another trial."""
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() < deadline, "no other trial came"
        time.sleep(0.02)


class Slow(ls.Hook):
    """Takes its time, and notes what each rank was given."""

    def on_start(self, run) -> None:
        Path(run.dir, f"rank-{run.rank}.json").write_text(json.dumps([lr, width]))

    def before_step(self, run) -> None:
        if options.meet is not None:
            meet(options.meet)
        time.sleep(options.seconds)
        if trouble == "kill":
            os.kill(os.getpid(), 9)
        if trouble == "memory":
            raise MemoryError
        if trouble == "hang":
            time.sleep(600)


def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    scale = float("nan") if trouble == "nan" else 1.0
    return F.mse_loss(output.mean(1), batch[1]) * scale


recipe = ls.Recipe(
    model=lambda: nn.Linear(4, width),
    data=TensorDataset(x, y),
    inputs=lambda batch: batch[0],
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
    global_batch=16,
    microbatch=4,
    steps=options.steps,
    evaluation=ls.Evaluation(data=TensorDataset(x, y), every=5),
)
if __name__ == "__main__":
    result = ls.train(recipe, hooks=[Slow()], saving=ls.Saving(every=5))
    if result.rank == 0:
        print("loss", result.metrics["loss"], file=sys.stderr)
