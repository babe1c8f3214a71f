"""Detection as in DETR: each image's predicted boxes are matched one to one with the true ones, and
the loss of the boxes is divided by their number in the global batch.

lockstep run --nproc 2 examples/cookbook/detection.py
"""

from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls

CLASSES, QUERIES, SIDE, ABSENT = 2, 4, 16, 0.3  # ABSENT: the weight of a query without a box
generator = torch.Generator().manual_seed(0)
counts = torch.randint(4, (192,), generator=generator).tolist()  # of boxes: some images have none
labels = torch.randint(CLASSES, (192, 3), generator=generator)
sizes = torch.tensor([[7, 3], [3, 7]])[labels]
corners = torch.randint(SIDE - 6, (192, 3, 2), generator=generator)
boxes = torch.cat([corners + sizes / 2, sizes], 2) / SIDE  # center, width and height
images = 0.1 * torch.randn(192, 1, SIDE, SIDE, generator=generator)
for i, count in enumerate(counts):
    for (x, y), (width, height) in zip(
        corners[i, :count].tolist(), sizes[i, :count].tolist(), strict=True
    ):
        images[i, 0, y : y + height, x : x + width] += 1.0
data = [(images[i], labels[i, :count], boxes[i, :count]) for i, count in enumerate(counts)]


def collate(samples: list[Any]) -> list[Any]:
    images, *others = zip(*samples, strict=True)
    return [torch.stack(images), *map(list, others)]


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1))
        self.places, self.queries = (
            nn.Parameter(torch.randn(16, 32)),
            nn.Parameter(torch.randn(QUERIES, 32)),
        )
        self.decoder = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
        self.label, self.box = nn.Linear(32, CLASSES + 1), nn.Linear(32, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = self.decoder(
            self.queries.expand(len(images), -1, -1), self.body(images).flatten(2).mT + self.places
        )
        return self.label(found), self.box(found).sigmoid()


def matched(logits: Tensor, boxes: Tensor, labels: Tensor, truth: Tensor) -> tuple[Tensor, ...]:
    """Of an image: logits and labels of all queries, and boxes of those that have one, predicted
    and true."""
    with torch.no_grad():
        cost = 5 * torch.cdist(boxes, truth, p=1) - logits.softmax(1)[:, labels]
        queries, chosen = linear_sum_assignment(cost.cpu())
    targets = torch.full_like(logits[:, 0], CLASSES, dtype=torch.long)
    targets[queries] = labels[chosen]
    return logits, targets, boxes[queries], truth[chosen]


def losses(output: Any, batch: Any) -> dict[str, ls.Sum]:
    logits, targets, boxes, truth = map(
        torch.cat, zip(*map(matched, *output, *batch[1:]), strict=True)
    )
    weights = torch.where(targets < CLASSES, 1.0, ABSENT)
    sums = (
        (weights * F.cross_entropy(logits, targets, reduction="none")).sum(),
        F.l1_loss(boxes, truth, reduction="sum"),
    )
    return {"label": ls.Sum(sums[0]), "box": ls.Sum(5 * sums[1])}


def weight(batch: Any) -> dict[str, float]:
    """The denominators of the two sums; those of the global batch are added."""
    count = sum(map(len, batch[1]))
    return {"label": count + ABSENT * (QUERIES * len(batch[1]) - count), "box": count}


def found(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """For each image: boxes that were found, with their label and at an overlap of 0.5; predicted
    and true boxes."""
    rows = []
    for logits, targets, boxes, truth in map(matched, *output, *batch[1:]):
        predicted, has_box = logits.argmax(1), targets < CLASSES
        low = torch.maximum(boxes[:, :2] - boxes[:, 2:] / 2, truth[:, :2] - truth[:, 2:] / 2)
        high = torch.minimum(boxes[:, :2] + boxes[:, 2:] / 2, truth[:, :2] + truth[:, 2:] / 2)
        common, both = (
            (high - low).clamp(min=0).prod(1),
            boxes[:, 2:].prod(1) + truth[:, 2:].prod(1),
        )
        hits = (predicted == targets)[has_box] & (common / (both - common) > 0.5)
        rows.append(torch.stack([hits.sum(), (predicted < CLASSES).sum() + has_box.sum()]))
    hits, boxes = torch.stack(rows).unbind(1)
    return hits, boxes


recipe = ls.Recipe(
    model=Detector,
    data=data[:160],
    collate=collate,
    inputs=lambda batch: batch[0],
    loss=losses,
    weight=weight,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    global_batch=16,
    microbatch=4,
    steps=20,
    clip_norm=1.0,
    evaluation=ls.Evaluation(
        data=data[160:],
        collate=collate,
        metrics={"f1": ls.Gathered(found, lambda hits, boxes: float(2 * hits.sum() / boxes.sum()))},
    ),
)


def train(**options: Any) -> str:
    return ls.train(recipe, **options).fingerprint


if __name__ == "__main__":
    train()
