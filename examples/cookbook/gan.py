"""A GAN: two models in one loop of its own; the generator moves in every second step.

lockstep run --nproc 2 examples/cookbook/gan.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(512, 2, generator=generator) * 0.3 + torch.tensor([2.0, -1.0]))


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(), nn.Linear(32, outputs))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.5, 0.9))


def train(**options: Any) -> str:
    with ls.Session(seed=0, **options) as session:
        artist, move_artist = session.prepare(lambda: perceptron(4, 2), adam)
        critic, move_critic = session.prepare(lambda: perceptron(2, 1), adam)
        for step in session.steps(data, global_batch=64, microbatch=16, steps=40):
            for (real,) in step.microbatches():
                fake = artist(torch.randn(len(real), 4)).detach()
                step.backward(
                    F.softplus(critic(fake)).mean() + F.softplus(-critic(real)).mean(), move_critic
                )
            step.commit(move_critic)
            if step.index % 2:
                step.skip(move_artist)  # its momentum stays as it is
                continue
            for (real,) in step.microbatches():
                step.backward(
                    F.softplus(-critic(artist(torch.randn(len(real), 4)))).mean(), move_artist
                )
            step.commit(move_artist, clip_norm=1.0)
        return ls.fingerprint(artist) + ls.fingerprint(critic)


if __name__ == "__main__":
    train()
