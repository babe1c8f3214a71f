"""Cross-validation: k trainings in one script, each in its own run directory. Killed, the same
command goes on where it was.

lockstep run --nproc 2 examples/cookbook/folds.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import lockstep as ls

FOLDS = 3
generator = torch.Generator().manual_seed(0)
x = torch.randn(240, 8, generator=generator)
data = TensorDataset(x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).long())
folds = torch.randperm(len(data), generator=generator).chunk(FOLDS)


def recipe_of(fold: int) -> ls.Recipe:
    """Trains on all folds but one, and measures that one."""
    others = torch.cat([*folds[:fold], *folds[fold + 1 :]])
    return ls.Recipe(
        model=lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 2)),
        data=Subset(data, others.tolist()),
        inputs=lambda batch: batch[0],
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        global_batch=32,
        microbatch=8,
        epochs=6,
        evaluation=ls.Evaluation(
            data=Subset(data, folds[fold].tolist()),
            metrics={"accuracy": ls.Mean(lambda output, batch: output.argmax(1) == batch[1])},
        ),
    )


def train(run_dir: str = "runs/folds", **options: Any) -> str:
    options = {"saving": ls.Saving(every="epoch"), **options}
    results = [
        ls.train(recipe_of(fold), run_dir=f"{run_dir}/{fold}", **options) for fold in range(FOLDS)
    ]
    accuracies = torch.tensor([result.metrics["accuracy"] for result in results])
    if ls.rank() == 0:
        print(f"accuracy {accuracies.mean():.3f} ± {accuracies.std():.3f} over {FOLDS} folds")
    return " ".join(result.fingerprint for result in results)


if __name__ == "__main__":
    train()
