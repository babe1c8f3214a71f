"""A language model on long sequences: each sequence is shared by several processes.

lockstep run --nproc 2 --plan context=2 examples/cookbook/long.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls

WORDS, TOKENS, WIDTH, HEADS = 32, 129, 32, 4
generator = torch.Generator().manual_seed(0)
beginnings = torch.randint(WORDS, (32, 43), generator=generator)
data = [{"words": row} for row in beginnings.repeat(1, 3)]  # each text says its beginning 3 times


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


def loss(scores: Tensor, batch: dict[str, Tensor]) -> ls.Sum:
    """Written as on one process. Under `context` it gets a part of the tokens, with their labels,
    also where the sequence is cut; so it is a sum over tokens, not a mean."""
    labels = batch["words"][:, 1:]
    return ls.Sum(F.cross_entropy(scores[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum"))


recipe = ls.Recipe(
    model=LanguageModel,
    data=data,
    inputs=lambda batch: batch["words"],
    loss=loss,
    weight=lambda batch: batch["words"][:, 1:].numel(),
    sequence=ls.Sequence(chunks=4),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    global_batch=8,
    microbatch=2,
    steps=10,
)


def train(**options: Any) -> str:
    return ls.train(recipe, **options).fingerprint


if __name__ == "__main__":
    train()
