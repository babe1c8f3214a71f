"""PyTorch-Ignite's Engine with `ignite.distributed`. As documented, accumulation reduces gradients
every microbatch."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
from baton import Baton
from ignite.engine import Engine, Events
from torch import nn
from workloads import CLIP_NORM, Given, Workload


def train(work: Workload, baton: Baton) -> None:
    size = work.task.processes
    spawned = {"nproc_per_node": size} if work.task.own_launcher and size > 1 else {}
    with idist.Parallel(backend="gloo" if size > 1 else None, **spawned) as parallel:
        parallel.run(_train, work, baton)


def _train(local_rank: int, work: Workload, baton: Baton) -> None:
    size = work.task.processes
    # Numbers for all processes together: Ignite divides batches and workers among them, and samples
    # round-robin.
    loader = idist.auto_dataloader(
        work.data,
        batch_size=work.microbatch * size,
        sampler=Given(work.order()),
        num_workers=work.workers * size,
        collate_fn=work.collate,
    )
    model = idist.auto_model(
        work.model(), **({"gradient_as_bucket_view": True} if size > 1 else {})
    )
    optimizer = idist.auto_optim(work.optimizer(model))

    def train_step(engine: Engine, batch: Any) -> None:
        model.train()
        loss = baton.saw(work.loss(model(work.inputs(batch)), batch))
        (loss / work.accumulated).backward()
        if engine.state.iteration % work.accumulated == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()

    trainer = Engine(train_step)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=work.accumulated), baton.step)
    trainer.run(loader, max_epochs=1)
