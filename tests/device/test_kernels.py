"""Kernels of a step beside those of a loop written by hand, on the stand-in accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from device.ranks import on_device
from scripts import models
from torch import nn
from torch.utils.data import default_collate

import lockstep as ls
from lockstep.testing.pool import WorkerPool

SAMPLES, MICROBATCH = 16, 4


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


class Kernels(ls.Hook):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def before_step(self, run: Any) -> None:
        self.counts.append(launched())


def launched() -> int:
    """The kernels since the last call."""
    import standin

    return sum(standin.take_counters().kernels.values())


def both(run_dir: str) -> tuple[int, int]:
    """Return the kernels of a step of lockstep, and of a step of the same training by hand."""
    hook = Kernels()
    recipe = ls.Recipe(
        **models.TEXTS,
        model=lambda: models.gpt(0.1),
        optimizer=adamw,
        global_batch=SAMPLES,
        microbatch=MICROBATCH,
        steps=8,
        clip_norm=1.0,
    )
    ls.train(recipe, run_dir=run_dir, hooks=[hook], log_every=100)
    return hook.counts[6], by_hand()


def by_hand() -> int:
    model = models.gpt(0.1).to("standin")
    optimizer = adamw(model)
    samples = models.TEXTS["data"]
    batches = [
        default_collate([samples[i] for i in range(start, start + MICROBATCH)])
        for start in range(0, SAMPLES, MICROBATCH)
    ]
    for _ in range(3):
        launched()
        total = sum(models.tokens(batch) for batch in batches)
        for batch in batches:
            here = {
                name: value.pin_memory().to("standin", non_blocking=True)
                for name, value in batch.items()
            }
            (models.of_words(model(here["input_ids"]), here).total / total).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return launched()


def test_a_step_has_at_most_a_twentieth_more_kernels(devices: WorkerPool, tmp_path: Path) -> None:
    ((ours, theirs),) = devices.run(1, on_device, both, str(tmp_path / "run"))
    assert 500 < theirs < ours <= 1.05 * theirs
