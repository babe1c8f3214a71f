"""python train.py [--mistake NAME]: a small recipe for tests of `lockstep verify`, correct or with
a mistake of its author.

The mistakes are those that people make in scripts. Faulty engines are in tests/verify/faults.py.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
VOCABULARY, LENGTH = 17, 6


class Network(nn.Module):
    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.1)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)
        if mistake == "bias of the world":
            self.head.bias.register_hook(lambda gradient: gradient * WORLD_SIZE)

    def forward(self, text: Tensor) -> Tensor:
        if self.mistake == "mask of the rank":
            torch.manual_seed(ls.rank())
        x = self.norm(self.embedding(text))
        return self.head(x + torch.tanh(self.hidden(self.dropout(x))))


class Shifted(TensorDataset):
    """A dataset that depends on the rank, like one written for a DistributedSampler."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return super().__getitem__((index + ls.rank()) % len(self))


def texts(mistake: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(1, VOCABULARY, (96, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (96, 1), generator=generator)
    kind = Shifted if mistake == "data of the rank" else TensorDataset
    return kind(text, (text * 3 + 1) % VOCABULARY, (torch.arange(LENGTH) < lengths).float())


def token_sum(logits: Tensor, batch: list[Tensor]) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none").view_as(
        batch[2]
    )
    return (each * batch[2]).sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default="")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--gradient-compression", default="none")
    options = parser.parse_args()
    mistake = options.mistake
    if mistake == "fails":
        raise ValueError("boom")
    if mistake == "never trains":
        sys.exit(0)
    if mistake == "fails on two" and WORLD_SIZE == 2:
        raise ValueError("boom on two")
    mean = mistake == "mean over tokens"
    rate = 1e-2 * (WORLD_SIZE if mistake == "rate of the world" else 1)
    recipe = ls.Recipe(
        model=lambda: Network(mistake),
        data=texts(mistake),
        inputs=lambda batch: batch[0],
        loss=lambda logits, batch: (
            token_sum(logits, batch) / batch[2].sum() if mean else ls.Sum(token_sum(logits, batch))
        ),
        weight=None if mean else lambda batch: batch[2].sum(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=rate),
        global_batch=24,
        microbatch=4,
        steps=options.steps,
        clip_norm=1.0,
        gradient_compression=options.gradient_compression,
    )
    ls.train(recipe)
    print("trained to the end")


if __name__ == "__main__":
    main()
