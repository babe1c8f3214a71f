"""Lightning's Trainer in its documented mode for measurements: `barebones`, without logger,
progress or checkpoints."""

from __future__ import annotations

from typing import Any

import lightning
from baton import Baton
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from workloads import CLIP_NORM, Workload


class Module(lightning.LightningModule):
    def __init__(self, work: Workload, baton: Baton) -> None:
        super().__init__()
        self.model = work.model()
        self.work = work
        self.baton = baton

    def train_dataloader(self) -> Any:
        return self.work.loader(self.global_rank)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.baton.saw(self.work.loss(self.model(self.work.inputs(batch)), batch))

    def configure_optimizers(self) -> Any:
        return self.work.optimizer(self.model)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if (index + 1) % self.work.accumulated == 0:
            self.baton.step()


def train(work: Workload, baton: Baton) -> None:
    size = work.task.processes
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if size > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=1,
        accumulate_grad_batches=work.accumulated,
        gradient_clip_val=CLIP_NORM,
        barebones=True,
    )
    trainer.fit(Module(work, baton))
