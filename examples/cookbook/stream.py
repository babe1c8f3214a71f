"""A stream of uneven files, shuffled in windows, resumed where it stood: each sample once an epoch.

lockstep run --nproc 2 examples/cookbook/stream.py
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls

folder = Path(
    os.environ.get("COOKBOOK_DATA") or Path(tempfile.gettempdir(), "lockstep-cookbook-stream")
)
COUNTS = [50, 7, 120, 31, 64]  # lines of each file


def write() -> None:
    """Write the files, if they are not there."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for number, count in enumerate(COUNTS):
        rows = torch.randn(count, 6, generator=generator)
        if (folder / f"{number}.jsonl").exists():  # rank 0 of the machine has written it
            continue
        lines = [json.dumps([row, sum(row[:3])]) for row in rows.tolist()]
        temporary = folder / f"{number}.tmp"
        temporary.write_text("\n".join(lines))
        temporary.rename(folder / f"{number}.jsonl")


def read(path: str, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples of one file from number `start` on."""
    with open(path, encoding="utf-8") as lines:
        for line in islice(lines, start, None):
            features, target = json.loads(line)
            yield torch.tensor(features), torch.tensor([target])


def recipe() -> ls.Recipe:
    ls.once(write)
    paths = [str(folder / f"{number}.jsonl") for number in range(len(COUNTS))]
    return ls.Recipe(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)),
        # 8 shards of 34 samples each
        data=ls.Stream.files(paths, read, shards=8, counts=COUNTS, window=16),
        inputs=lambda batch: batch[0],
        loss=lambda output, batch: F.mse_loss(output, batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        global_batch=32,
        microbatch=4,
        steps=40,
    )


def train(**options: Any) -> str:
    return ls.train(recipe(), **options).fingerprint


if __name__ == "__main__":
    train()
