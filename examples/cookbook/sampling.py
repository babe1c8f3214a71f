"""Sampling: texts of many lengths in batches by tokens, and rare labels as often as frequent ones.

lockstep run --nproc 2 examples/cookbook/sampling.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import lockstep as ls

generator = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(4, 40, (300,), generator=generator).tolist()
TEXTS = [torch.randint(1, 50, (length,), generator=generator) for length in LENGTHS]
LABELS = [int((text == 7).any() or (text == 8).any()) for text in TEXTS]
data = list(zip(TEXTS, LABELS, strict=True))


def pad(samples: list[Any]) -> tuple[Tensor, Tensor]:
    texts, labels = zip(*samples, strict=True)
    return pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 2)

    def forward(self, texts: Tensor) -> Tensor:
        words: Tensor = self.words(texts).amax(1)
        return self.head(words)


common: dict[str, Any] = {
    "model": Classifier,
    "data": data,
    "collate": pad,
    "inputs": lambda batch: batch[0],
    "loss": lambda output, batch: F.cross_entropy(output, batch[1]),
    "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "evaluation": ls.Evaluation(data=data[:50], collate=pad, microbatch=10),
}
by_tokens = ls.Recipe(
    **common, epochs=2, batch_sampler=ls.samplers.by_length(LENGTHS, tokens=200, microbatches=4)
)
balanced = ls.Recipe(
    **common,
    epochs=2,
    global_batch=40,
    microbatch=10,
    sampler=ls.samplers.balanced(LABELS, samples=200),
)


def train(recipe: ls.Recipe = by_tokens, **options: Any) -> str:
    return ls.train(recipe, **options).fingerprint


if __name__ == "__main__":
    train()
    train(balanced)
