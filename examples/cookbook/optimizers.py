"""Optimizers: two of them, a group without weight decay, a body that thaws, and a rate that falls
on a plateau.

lockstep run --nproc 2 examples/cookbook/optimizers.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import lockstep as ls

generator = torch.Generator().manual_seed(0)
x = torch.randn(256, 10, generator=generator)
y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(10, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.GELU()
        )
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x))
        return y


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    matrices = [parameter for parameter in model.body.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.body.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return [
        torch.optim.AdamW(groups, lr=3e-3),
        torch.optim.SGD(model.head.parameters(), lr=0.03, momentum=0.9),
    ]


class Thaw(ls.Hook):
    """Trains the head alone for 10 steps."""

    def before_step(self, run: Any) -> None:
        if run.step == 0:
            run.freeze("body.*")
        if run.step == 10:
            run.unfreeze("body.*")


recipe = ls.Recipe(
    model=Network,
    data=TensorDataset(x[:192], y[:192]),
    inputs=lambda batch: batch[0],
    loss=lambda output, batch: F.mse_loss(output, batch[1]),
    optimizer=optimizers,
    # of the evaluation's loss
    schedule=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
    global_batch=32,
    microbatch=8,
    steps=40,
    clip_norm=1.0,
    evaluation=ls.Evaluation(data=TensorDataset(x[192:], y[192:]), every=5),
)


def train(**options: Any) -> str:
    return ls.train(recipe, **{"hooks": [Thaw()], **options}).fingerprint


if __name__ == "__main__":
    train()
