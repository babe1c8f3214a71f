"""CLIP: two towers, and a contrastive loss over the global batch, whatever the microbatch and the
number of processes.

lockstep run --nproc 2 examples/cookbook/clip.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

generator = torch.Generator().manual_seed(0)
meaning = torch.randn(160, 4, generator=generator)
images = meaning @ torch.randn(4, 12, generator=generator) + 0.1 * torch.randn(
    160, 12, generator=generator
)
# words that are there, or not
captions = (meaning @ torch.randn(4, 20, generator=generator) > 0).long()


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
        self.words = nn.Embedding(40, 8)
        self.text = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, image: Tensor, caption: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        words = self.words(2 * torch.arange(20) + caption).mean(1)
        return (
            F.normalize(self.image(image)),
            F.normalize(self.text(words)),
            self.scale.exp().expand(len(image)),
        )


def contrast(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The loss of all pairs of the global batch: each sample's own against all others."""
    logits, own = scale.mean() * image @ text.T, torch.arange(len(image), device=image.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def found(image: Tensor, text: Tensor, scale: Tensor) -> float:
    """The fraction of images whose caption is the nearest one of all."""
    return float(((image @ text.T).argmax(1) == torch.arange(len(image))).float().mean())


recipe = ls.Recipe(
    model=TwoTowers,
    data=TensorDataset(images[:128], captions[:128]),
    inputs=tuple,
    batch_loss=ls.Gathered(lambda output, batch: output, contrast),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    global_batch=64,
    microbatch=8,
    steps=30,
    clip_norm=1.0,
    evaluation=ls.Evaluation(
        data=TensorDataset(images[128:], captions[128:]),
        every=10,
        metrics={"retrieval": ls.Gathered(lambda output, batch: output, found)},
    ),
)


def train(**options: Any) -> str:
    result = ls.train(recipe, **options)
    if result.rank == 0:
        print(result.metrics)
    return result.fingerprint


if __name__ == "__main__":
    train()
