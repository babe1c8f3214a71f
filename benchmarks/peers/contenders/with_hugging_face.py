"""Hugging Face's Trainer without logs, saves and progress. It has no option for gradients as views
of DDP's buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton import Baton
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from workloads import CLIP_NORM, Workload


class AfterStep(TrainerCallback):
    def __init__(self, baton: Baton) -> None:
        self.baton = baton

    def on_step_end(self, *arguments: Any, **more: Any) -> None:
        self.baton.step()


class Named:
    """A dataset of dicts, which the Trainer needs."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> dict[str, Any]:
        return {"batch": self.collate(samples)}


class OurTrainer(Trainer):
    """A Trainer for a model, a loss and batches that are not from transformers."""

    def __init__(self, work: Workload, baton: Baton, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.work = work
        self.baton = baton

    def get_train_dataloader(self) -> Any:
        loader = self.work.loader()
        loader.collate_fn = Named(loader.collate_fn)
        return self.accelerator.prepare(loader)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        batch = inputs["batch"]
        return self.baton.saw(self.work.loss(model(self.work.inputs(batch)), batch))


def train(work: Workload, baton: Baton) -> None:
    model = work.model()
    arguments = TrainingArguments(
        output_dir=work.task.scratch,
        use_cpu=True,
        max_steps=work.task.steps,
        per_device_train_batch_size=work.microbatch,
        gradient_accumulation_steps=work.accumulated,
        max_grad_norm=CLIP_NORM,
        ddp_backend="gloo" if work.task.processes > 1 else None,
        ddp_find_unused_parameters=False,
        lr_scheduler_type="constant",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = OurTrainer(
        work,
        baton,
        model=model,
        args=arguments,
        train_dataset=work.data,
        optimizers=(work.optimizer(model), None),
        callbacks=[AfterStep(baton)],
    )
    trainer.train()
