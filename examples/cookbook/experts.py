"""A mixture of experts of one's own: stacked parameters, a router, and a balance over the whole
global batch.

lockstep run --nproc 2 examples/cookbook/experts.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

WORDS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 64, 32, 32, 8, 2


class Experts(nn.Module):
    """All experts of a layer. Dim 0 of each parameter is the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in index.unique().tolist():
            row, choice = (index == expert).nonzero(as_tuple=True)
            computed = F.silu(tokens[row] @ self.up[expert]) @ self.down[expert]
            output = output.index_add(0, row, computed * weights[row, choice, None])
        return output


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        # the bias changes which experts are chosen, not their weights
        index = (scores + self.e_score_correction_bias).topk(CHOSEN).indices
        weights = scores.gather(1, index)
        weights = weights / weights.sum(-1, keepdim=True)
        return x + self.experts(tokens, index, weights).view_as(x)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


text = torch.randint(WORDS, (96, 13), generator=torch.Generator().manual_seed(0))
text[:, 1::2] = (text[:, ::2][:, :6] + 1) % WORDS  # something to learn


def loss(logits: Tensor, batch: Sequence[Any]) -> ls.Sum:
    words = batch[0][:, 1:].flatten()
    return ls.Sum(F.cross_entropy(logits.flatten(0, 1), words, reduction="sum"))


recipe = ls.Recipe(
    model=Mixture,
    data=TensorDataset(text),
    inputs=lambda batch: batch[0][:, :-1],
    loss=loss,
    weight=lambda batch: batch[0][:, 1:].numel(),
    balance=ls.Balance(coefficient=0.01, over="step", bias_rate=0.001, z=0.001),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    global_batch=16,
    microbatch=4,
    steps=10,
)


def train(**options: Any) -> str:
    return ls.train(recipe, **options).fingerprint


if __name__ == "__main__":
    train()
