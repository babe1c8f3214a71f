"""The precision of forwards: autocast, and the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.base.torch_private import cpu_multiplies_bf16, update_loss_scale
from lockstep.comm.mesh import to_local
from lockstep.plan import Plan
from lockstep.recipe.checks import Precision

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS_TO_DOUBLE = 2000
"""Number of steps without an overflow after which the fp16 loss scale doubles, as in torch's
GradScaler."""


def autocast(
    precision: Precision, device: torch.device, *, keep_casts: bool = True
) -> AbstractContextManager[Any]:
    """With `keep_casts`, each weight is cast once per forward. With `keep_casts`, the gradients of
    a weight's uses are added in autocast's precision."""
    dtype = AUTOCAST.get(precision)
    if dtype is None:
        return nullcontext()
    return _Autocast(partial(torch.autocast, device.type, dtype=dtype, cache_enabled=keep_casts))


class _Autocast:
    """A reentrant autocast context. A torch.autocast object that is entered twice would leave
    autocast on."""

    def __init__(self, make: Callable[[], torch.autocast]) -> None:
        self._make = make
        self._entered: list[torch.autocast] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def keeps_casts(plan: Plan) -> bool:
    """Under `shard`, autocast would cache a cast copy of the full model. With numerics=bitwise, all
    plans must compute the same as `shard`."""
    return not plan.divides("parameters") and plan.numerics == "fast"


class LossScale:
    """Keeps fp16 gradients from underflow. The scale is halved at an overflow, and doubled after
    2000 steps without an overflow."""

    def __init__(self) -> None:
        self.value = 2.0**16
        self.in_a_row = 0  # steps without an overflow since the last change
        self.overflows = 0  # consecutive steps with an overflow, ending at the latest step

    @property
    def divisor(self) -> float | Tensor:
        """Return a tensor if the scale is on the device: the host does not wait for it."""
        return self.value

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        if gradients:
            torch._foreach_mul_([to_local(gradient) for gradient in gradients], 1.0 / self.divisor)

    def update(self, *, overflowed: bool) -> None:
        self.in_a_row = 0 if overflowed else self.in_a_row + 1
        self.overflows = self.overflows + 1 if overflowed else 0
        if overflowed:
            self.value /= 2.0
        elif self.in_a_row == STEPS_TO_DOUBLE:
            self.value *= 2.0
            self.in_a_row = 0


class DeviceLossScale(LossScale):
    """A `LossScale` on the device. The host does not wait to learn if a step overflowed."""

    def __init__(self, device: torch.device) -> None:
        self._scale = torch.zeros((), device=device)
        self._in_a_row = torch.zeros((), device=device, dtype=torch.int32)
        self._overflows = torch.zeros((), device=device)
        super().__init__()

    @property
    def value(self) -> float:
        return self._scale.item()

    @value.setter
    def value(self, value: float) -> None:
        self._scale.fill_(value)

    @property
    def in_a_row(self) -> int:
        return int(self._in_a_row.item())

    @in_a_row.setter
    def in_a_row(self, steps: int) -> None:
        self._in_a_row.fill_(steps)

    @property
    def overflows(self) -> int:
        return int(self._overflows.item())

    @overflows.setter
    def overflows(self, steps: int) -> None:
        self._overflows.fill_(steps)

    @property
    def divisor(self) -> Tensor:
        # a copy: `update_by` changes the scale in place while an optimizer may still hold the
        # result
        return self._scale.clone()

    def update_by(self, found_inf: Tensor) -> None:
        update_loss_scale(self._scale, self._in_a_row, found_inf, steps_to_double=STEPS_TO_DOUBLE)
        self._overflows.add_(1.0).mul_(found_inf)


def loss_scale(precision: Precision, device: torch.device | None) -> LossScale | None:
    if precision != "fp16":
        return None
    return LossScale() if device is None else DeviceLossScale(device)


def candidates(device: torch.device) -> list[Precision]:
    # on a CPU only fp32: the run may be resumed on a CPU without bf16 instructions
    if not accelerator.is_accelerator(device):
        return ["fp32"]
    if accelerator.computes_bf16(device):
        return ["fp32", "bf16"]
    return ["fp32", "fp16"] if accelerator.computes_fp16(device) else ["fp32"]


def slow_on_this_cpu(precision: Precision, device: torch.device) -> str | None:
    if (
        precision == "fp32"
        or device.type != "cpu"
        or (precision == "bf16" and cpu_multiplies_bf16())
    ):
        return None
    return (
        f"this CPU has no {precision} matrix instructions: expect {precision} to be many times"
        " slower than fp32"
    )


def slow_without_tf32(precision: Precision, device: torch.device) -> str | None:
    if precision != "fp32" or not accelerator.leaves_tf32_unused(device):
        return None
    return (
        "products in fp32 do not use this GPU's TF32, which is several times faster and rounds"
        " their factors to 10 bits, as convolutions here do; choose with"
        ' torch.set_float32_matmul_precision("high") or ("highest") before the training, or'
        ' precision="bf16"'
    )
