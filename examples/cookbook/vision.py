"""Vision: random augmentation, MixUp, a moving average of the weights, and the best checkpoint by
its accuracy.

lockstep run --nproc 2 examples/cookbook/vision.py lockstep verify examples/cookbook/vision.py
--whole-microbatch-loss --plans replicate=2  # MixUp mixes a microbatch
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

import lockstep as ls

CLASSES = 4


class Images(Dataset[Any]):
    """Noisy images with a bright corner, which is the label."""

    def __init__(self, samples: int, seed: int, *, augmented: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)
        self.images = torch.randn(samples, 1, 8, 8, generator=generator)
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            image[:, 4 * (label // 2) :, 4 * (label % 2) :] += 1.0
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # seeded by lockstep for each sample and epoch
        noise = 0.1 * torch.randn(1, 8, 8) if self.augmented else 0.0
        return self.images[index] + noise, int(self.labels[index])


def mixup(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Mix each sample with another one of its microbatch, and its label too. For training alone."""
    images, labels = default_collate(samples)
    targets = F.one_hot(labels, CLASSES).float()
    share, order = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(images))
    return (
        share * images + (1 - share) * images[order],
        share * targets + (1 - share) * targets[order],
    )


def network() -> nn.Module:
    features = [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(2),
    ]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(32, CLASSES))


def correct(output: Tensor, batch: Any) -> Tensor:
    return output.argmax(1) == batch[1]


held_out = ls.Evaluation(
    data=Images(100, seed=2, augmented=False), every=20, metrics={"accuracy": ls.Mean(correct)}
)
recipe = ls.Recipe(
    model=network,
    data=Images(320, seed=1, augmented=True),
    collate=mixup,
    inputs=lambda batch: batch[0],
    # targets of classes, or their shares
    loss=lambda output, batch: F.cross_entropy(output, batch[1]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    schedule=ls.warmup_cosine(warmup=5, total=40),
    global_batch=32,
    microbatch=8,
    epochs=4,
    evaluation={"current": held_out, "average": replace(held_out, weights="average")},
)


def train(**options: Any) -> str:
    options = {"saving": ls.Saving(best="average/accuracy", mode="max"), **options}
    return ls.train(recipe, hooks=[ls.ExponentialMovingAverage(0.9)], **options).fingerprint


if __name__ == "__main__":
    train()
