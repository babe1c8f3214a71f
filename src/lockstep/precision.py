"""What the forward computes in, and what stands between the summed gradient and the optimizer: loss scale, global norm, clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lockstep.recipe import Precision

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context that a forward runs in. Backward runs outside of it."""
    dtype = AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def loss_scaler(precision: Precision, device: torch.device, *, factor: int) -> torch.amp.GradScaler | None:
    """fp16 gradients underflow unless the loss is scaled; torch's own scaler does it, halving the scale at an overflow.

    The first scale is 2**16, less whatever `factor` the loss is multiplied by besides.
    """
    if precision != "fp16":
        return None
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0 ** (16 - (factor - 1).bit_length()))
    scaler.scale(torch.zeros((), device=device))  # makes its state, which a rank without a microbatch needs too
    return scaler


def slow_on_this_cpu(precision: Precision, device: torch.device) -> str | None:
    """Why this precision is a bad choice here, or None."""
    if precision == "fp32" or device.type != "cpu":
        return None
    if precision == "bf16" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return None
    return f"this CPU has no {precision} matrix instructions: expect {precision} to be many times slower than fp32"


def global_norm(gradients: Sequence[Tensor]) -> Tensor | float:
    """The 2-norm of all gradients as one vector: a number on a CPU, a scalar tensor on a GPU, which the host does not wait for.

    Each tensor's own norm first, then theirs in one step: the order does not depend on how gradients are laid out in memory.
    """
    norms = list(torch._foreach_norm(list(gradients))) if gradients else []
    if all(norm.is_cpu for norm in norms):
        return math.hypot(*[norm.item() for norm in norms])
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def total(gradients: Sequence[Tensor]) -> Tensor | float:
    """A number that is finite only where every gradient is: their sums' sizes. Half the time of the norm, on a CPU."""
    if gradients and gradients[0].is_cpu:
        return sum([abs(gradient.sum().item()) for gradient in gradients])
    return global_norm(gradients)


def clip(gradients: Sequence[Tensor], norm: Tensor | float, limit: float) -> None:
    """Scale the gradients so that their global norm, `norm` now, is at most `limit`. A norm that is not finite is left alone."""
    if isinstance(norm, Tensor):
        factor = torch.clamp(limit / norm, max=1.0)
        torch._foreach_mul_(list(gradients), torch.where(torch.isfinite(norm), factor, 1.0))
    elif limit < norm < math.inf:
        torch._foreach_mul_(list(gradients), limit / norm)
