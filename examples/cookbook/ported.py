"""A training loop that was written for DDP: DistributedSampler, no_sync, clipping, GradScaler and
barriers are gone.

lockstep run --nproc 2 examples/cookbook/ported.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

generator = torch.Generator().manual_seed(0)
x = torch.randn(300, 12, generator=generator)
data = TensorDataset(x, (x.sum(1) > 0).long())


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))


def train(**options: Any) -> str:
    with ls.Session(seed=0, precision="fp32", **options) as session:
        model, optimizer = session.prepare(
            build_model,
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30),
        )
        # was: loader, sampler.set_epoch, accumulation
        for step in session.steps(data, global_batch=50, microbatch=10, epochs=5):
            correct = []
            for features, labels in step.microbatches(dummies=True):
                with session.autocast():
                    logits = model(features)
                    loss = F.cross_entropy(logits, labels)
                step.backward(loss)  # was: scaler.scale(loss / accumulation).backward() in no_sync
                if not step.is_dummy:  # under `shard`, a forward whose batch another process counts
                    correct.append(logits.argmax(1) == labels)
            # was: unscale_, clip_grad_norm_, step, update, zero_grad, scheduler.step
            step.commit(optimizer, clip_norm=1.0)
            step.log({"accuracy": session.mean(torch.cat(correct) if correct else torch.empty(0))})
        return ls.fingerprint(model)


if __name__ == "__main__":
    train()
