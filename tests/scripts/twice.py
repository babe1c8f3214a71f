"""Trains twice in one process, and prints each result once."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

recipe = ls.Recipe(
    model=lambda: nn.Linear(4, 1),
    data=TensorDataset(torch.ones(64, 4)),
    inputs=lambda batch: batch[0],
    loss=lambda output, batch: output.square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    global_batch=8,
    microbatch=4,
    steps=4,
)
for _ in range(2):
    result = ls.train(recipe)
    if result.rank == 0:
        print(result.world_size, result.fingerprint)
