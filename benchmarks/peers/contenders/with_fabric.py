"""Lightning Fabric with `no_backward_sync`, gradients as views of DDP's buckets, and no check of
the clipping norm."""

from __future__ import annotations

from baton import Baton
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from workloads import CLIP_NORM, Workload


def train(work: Workload, baton: Baton) -> None:
    size = work.task.processes
    fabric = Fabric(
        accelerator="cpu",
        devices=size,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if size > 1 else "auto",
    )
    fabric.launch()
    model = work.model()
    model, optimizer = fabric.setup(model, work.optimizer(model))
    loader = fabric.setup_dataloaders(
        work.loader(fabric.global_rank), use_distributed_sampler=False
    )
    for number, batch in enumerate(loader, start=1):
        accumulating = number % work.accumulated != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = baton.saw(work.loss(model(work.inputs(batch)), batch))
            fabric.backward(loss / work.accumulated)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=CLIP_NORM, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            baton.step()
