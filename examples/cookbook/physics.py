"""A physics-informed network: the loss is how far the network is from solving a differential
equation, by second derivatives of its output.

lockstep run --nproc 2 examples/cookbook/physics.py
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls

generator = torch.Generator().manual_seed(0)
points = torch.rand(512, 2, generator=generator)
is_edge = torch.rand(512, generator=generator) < 0.25
side = torch.randint(4, (512,), generator=generator)
rows = is_edge.nonzero().flatten()
# on one of the four edges of the unit square
points[rows, side[rows] % 2] = (side[rows] // 2).float()
grid = torch.cartesian_prod(torch.linspace(0, 1, 12), torch.linspace(0, 1, 12))


def solution(points: Tensor) -> Tensor:
    """The solution of -Δu = 2π² sin(πx) sin(πy) with u = 0 on the edges."""
    return (math.pi * points).sin().prod(1, keepdim=True)


def losses(model: nn.Module, batch: Any) -> dict[str, ls.Sum]:
    """Two sums, over the points inside and over those on the edges. `weight` counts both."""
    points, is_edge = batch
    with torch.enable_grad():  # evaluations, and the trial of the loss, turn gradients off
        points = points.clone().requires_grad_()
        output = model(points)
        (slope,) = torch.autograd.grad(output.sum(), points, create_graph=True)
        bends = [
            torch.autograd.grad(slope[:, i].sum(), points, create_graph=True)[0][:, i]
            for i in range(2)
        ]
    residual = sum(bends) + 2 * math.pi**2 * solution(points.detach())[:, 0]
    return {
        "equation": ls.Sum(residual[~is_edge].square().sum()),
        "edges": ls.Sum(100 * output[is_edge].square().sum()),
    }


recipe = ls.Recipe(
    model=lambda: nn.Sequential(
        nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    ),
    data=TensorDataset(points, is_edge),
    loss=losses,
    weight=lambda batch: {"equation": (~batch[1]).sum(), "edges": batch[1].sum()},
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
    schedule=ls.warmup_cosine(warmup=5, total=60),
    global_batch=128,
    microbatch=32,
    steps=60,
    evaluation=ls.Evaluation(  # without Recipe.inputs, functions of an evaluation get the model too
        data=TensorDataset(grid),
        microbatch=36,
        loss=lambda model, batch: (model(batch[0]) - solution(batch[0])).square().mean(),
        metrics={
            "error": ls.Gathered(
                lambda model, batch: (model(batch[0]), solution(batch[0])),
                lambda found, true: float((found - true).norm() / true.norm()),
            )
        },
    ),
)


def train(**options: Any) -> str:
    return ls.train(recipe, **options).fingerprint


if __name__ == "__main__":
    train()
