"""The loop of most tutorials: default AdamW and DDP; each microbatch's loss is read and its
gradients are reduced."""

from __future__ import annotations

import os

import torch.distributed as dist
from baton import Baton
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import CLIP_NORM, Workload


def train(work: Workload, baton: Baton) -> None:
    model = work.model()
    if work.task.processes > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = work.optimizer(model, fused=False)
    total = 0.0
    for number, batch in enumerate(work.loader(int(os.environ.get("RANK", 0))), start=1):
        loss = baton.saw(work.loss(model(work.inputs(batch)), batch))
        (loss / work.accumulated).backward()
        total += loss.item()
        if number % work.accumulated == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            baton.step()
