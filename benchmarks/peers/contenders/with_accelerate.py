"""Hugging Face Accelerate with `accumulate` and gradients as views of DDP's buckets."""

from __future__ import annotations

from accelerate import Accelerator, DistributedDataParallelKwargs
from baton import Baton
from workloads import CLIP_NORM, Workload


def train(work: Workload, baton: Baton) -> None:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=work.accumulated,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    model = work.model()
    model, optimizer, loader = accelerator.prepare(model, work.optimizer(model), work.loader())
    for batch in loader:
        with accelerator.accumulate(model):
            loss = baton.saw(work.loss(model(work.inputs(batch)), batch))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            baton.step()
