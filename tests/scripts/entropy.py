"""Trains on labels, or with a loss, from a generator that nobody seeds: another run on each
start."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

generator = torch.Generator()
generator.seed()
seeded = torch.Generator().manual_seed(0)
x = torch.randn(64, 4, generator=seeded)
y = torch.randn(64, 1, generator=generator if sys.argv[1] == "data" else seeded)


def loss(output, batch):
    noise = torch.randn(output.shape, generator=generator) if sys.argv[1] == "loss" else 0.0
    return (output + noise - batch[1]).square().mean()


ls.train(
    ls.Recipe(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        data=TensorDataset(x, y),
        inputs=lambda batch: batch[0],
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        global_batch=16,
        microbatch=8,
        steps=4,
    )
)
