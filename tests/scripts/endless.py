"""endless.py RUN_DIR [SECONDS]: trains until it is stopped. Each microbatch takes SECONDS."""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 0.02


def loss(output: torch.Tensor, batch: tuple[torch.Tensor]) -> torch.Tensor:
    Path(sys.argv[1]).with_name("computes").touch()
    time.sleep(SECONDS)
    return output.square().mean()


recipe = ls.Recipe(
    model=lambda: nn.Linear(4, 1),
    data=TensorDataset(torch.ones(64, 4)),
    inputs=lambda batch: batch[0],
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    global_batch=8,
    microbatch=4,
    steps=100_000,
)
ls.train(recipe, run_dir=sys.argv[1], log_every=1)
