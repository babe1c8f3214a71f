"""`torch.nn.DataParallel`: one process splits each microbatch over several GPUs. Each forward
copies the model to the other GPUs, and one Python process drives them all: `replicate` is
faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.base import accelerator
from lockstep.base.errors import PlanError, RecipeError
from lockstep.base.torch_private import BatchNormBase


def gpus_of(home: torch.device, count: int) -> list[int]:
    """Return the indices of the GPUs, `home` first. Raises `PlanError` for too few GPUs, or a
    device that torch's DataParallel does not support."""
    if accelerator.is_accelerator(home) and not accelerator.runs_data_parallel(home):
        raise PlanError(
            f"data_parallel={count} on {home.type}; torch.nn.DataParallel works on CUDA and ROCm"
            f" alone; use replicate={count}, which works on every device, and is faster"
        )
    there = accelerator.count() if accelerator.is_accelerator(home) else 0
    if there < count:
        raise PlanError(
            f"data_parallel={count} and {there} GPUs; it splits each microbatch over the GPUs of"
            f" one process; use replicate={count}, which runs on CPUs too, and faster on GPUs"
        )
    return list(range(count))


def wrap_data_parallel(model: nn.Module, gpus: list[int]) -> None:
    """Let `torch.nn.DataParallel` run the model's forward: each GPU gets a slice of dim 0 of every
    tensor argument. The model and its output stay on the first GPU. Raises `RecipeError` for a
    model with BatchNorm."""
    if layers := [
        name for name, module in model.named_modules() if isinstance(module, BatchNormBase)
    ]:
        raise RecipeError(
            f"data_parallel={len(gpus)} and a model with BatchNorm ({layers[0]!r}); each GPU would "
            "take the statistics of its part of a microbatch, and only the first GPU's would be "
            f"kept; use replicate={len(gpus)}"
        )
    parallel = nn.DataParallel(_OwnForward(model), device_ids=gpus)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # drawn from the microbatch's generator, so that each part has other masks
        for gpu in gpus[1:]:
            accelerator.generator(torch.device(str(accelerator.kind()), gpu)).manual_seed(
                int(torch.randint(2**62, ()))
            )
        return parallel(*args, **kwargs)

    model.forward = forward


class _OwnForward(nn.Module):
    """The module that DataParallel replicates. It calls the class's forward: `model.forward` is
    DataParallel's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).forward(self.model, *args, **kwargs)
