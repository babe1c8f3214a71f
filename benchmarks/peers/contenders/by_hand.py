"""A careful hand-written loop: fused AdamW, gradients as views of DDP's buckets, one reduction per
step, no loss read."""

from __future__ import annotations

import contextlib
import os

import torch.distributed as dist
from baton import Baton
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import CLIP_NORM, Workload


def train(work: Workload, baton: Baton) -> None:
    model = work.model()
    optimizer = work.optimizer(model)
    parallel = model
    if work.task.processes > 1:
        dist.init_process_group("gloo")
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for number, batch in enumerate(work.loader(int(os.environ.get("RANK", 0))), start=1):
        last = number % work.accumulated == 0
        with contextlib.nullcontext() if last or parallel is model else parallel.no_sync():
            loss = baton.saw(work.loss(parallel(work.inputs(batch)), batch))
            (loss if work.accumulated == 1 else loss / work.accumulated).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            baton.step()
