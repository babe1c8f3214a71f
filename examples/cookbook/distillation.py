"""Distillation: a frozen teacher, a small student, and two terms of the loss.

lockstep run --nproc 2 examples/cookbook/distillation.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

TEMPERATURE = 2.0
generator = torch.Generator().manual_seed(0)
x = torch.randn(256, 8, generator=generator)


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 4))


with torch.random.fork_rng():
    torch.manual_seed(1)  # in life: load_state_dict
    teacher = perceptron(64).eval().requires_grad_(False)
labels = teacher(x).argmax(1)


def losses(output: Tensor, batch: Any) -> dict[str, Tensor]:
    """The teacher is no part of the recipe's model, so it is neither trained nor sharded."""
    with torch.no_grad():
        soft = F.softmax(teacher(batch[0]) / TEMPERATURE, dim=1)
    distilled = (
        F.kl_div(F.log_softmax(output / TEMPERATURE, dim=1), soft, reduction="batchmean")
        * TEMPERATURE**2
    )
    return {"teacher": distilled, "labels": 0.1 * F.cross_entropy(output, batch[1])}


recipe = ls.Recipe(
    model=lambda: perceptron(8),
    data=TensorDataset(x, labels),
    inputs=lambda batch: batch[0],
    loss=losses,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    global_batch=32,
    microbatch=8,
    epochs=5,
    evaluation=ls.Evaluation(data=TensorDataset(x[:64], labels[:64]), every=20),
)


def train(**options: Any) -> str:
    return ls.train(recipe, **options).fingerprint


if __name__ == "__main__":
    train()
