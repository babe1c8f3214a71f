"""The precision of forwards: autocast, and the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.base.torch_private import cpu_multiplies_bf16
from lockstep.comm.mesh import to_local
from lockstep.recipe.checks import Precision

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS_TO_DOUBLE = 2000
"""Steps in a row without an overflow after which the loss scale doubles, as in torch's GradScaler."""


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context manager for forwards. Backwards run outside of it."""
    dtype = AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


class LossScale:
    """The factor of an fp16 loss against underflow: halved when the norm overflows, doubled after 2000 good steps."""

    def __init__(self, *, factor: int) -> None:
        """`factor`: another factor of the loss. The product of both begins at 2**16."""
        self.value = 2.0 ** (16 - (factor - 1).bit_length())
        self.in_a_row = 0  # steps without an overflow since the last change

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        if gradients:
            torch._foreach_mul_([to_local(gradient) for gradient in gradients], 1.0 / self.value)

    def update(self, *, overflowed: bool) -> None:
        """Called once a step."""
        self.in_a_row = 0 if overflowed else self.in_a_row + 1
        if overflowed:
            self.value /= 2.0
        elif self.in_a_row == STEPS_TO_DOUBLE:
            self.value *= 2.0
            self.in_a_row = 0


def candidates(device: torch.device) -> list[Precision]:
    """The precisions that `precision="auto"` chooses from: fp32, and on a GPU bf16, or fp16 on older ones."""
    if not accelerator.is_accelerator(device):  # a run keeps its precision, and may be resumed on a CPU without bf16 instructions
        return ["fp32"]
    if accelerator.computes_bf16(device):
        return ["fp32", "bf16"]
    return ["fp32", "fp16"] if accelerator.computes_fp16(device) else ["fp32"]


def slow_on_this_cpu(precision: Precision, device: torch.device) -> str | None:
    """Why this precision is slow on this CPU; None if it is not."""
    if precision == "fp32" or device.type != "cpu" or (precision == "bf16" and cpu_multiplies_bf16()):
        return None
    return f"this CPU has no {precision} matrix instructions: expect {precision} to be many times slower than fp32"
