"""The numbers of a step that ranks exchange together with the gradients: which parameters were
used, each microbatch's loss and weight, numbers that show if the ranks have made the same calls,
and one flag.

They are packed into one vector that is summed over the ranks, so a step needs no collective besides
the gradients'. A microbatch's loss and weight are zero on all ranks but one, so their sum is exact.
(If several ranks divide the microbatch's tokens, each has a part of its loss and weight.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.base.torch_private import version
from lockstep.comm.world import World
from lockstep.training.reducers.agreement import StepAgreement

_MAX_LIST_LENGTH = 256
"""Up to this many losses of microbatches on the CPU are returned as a list, which is faster to read
than a tensor."""
READY_TWICE = (
    "a parameter's gradient was ready twice in one backward, as with reentrant activation"
    " checkpointing; ranks sum each gradient once; pass use_reentrant=False to"
    " torch.utils.checkpoint.checkpoint"
)
"""Text of the error that every reducer raises for a backward inside another backward."""
Number = Tensor | float  # a scalar tensor, or a number if the host has it already


def gradient_versions(parameters: Sequence[Tensor]) -> list[tuple[int, int] | None]:
    """Return, for each parameter, the id of its gradient and the number of in-place writes to it;
    None for a parameter without a gradient."""
    return [None if p.grad is None else (id(p.grad), version(p.grad)) for p in parameters]


class StepStats(NamedTuple):
    """The numbers of a step (used parameters, losses, weights, flags), combined over all ranks."""

    used: Tensor | list[float]  # (parameters,): 0 if no microbatch used the parameter
    values: Tensor | list[float]  # shape (microbatches,): each microbatch's loss
    weights: Tensor | None  # shape (microbatches,); None if the forward does not compute weights
    flags: Tensor | bool  # the number of ranks whose flag is set, or True if any is
    # shape (`StepAgreement.count`,): 0 if the ranks have made the same calls; None if not compared
    agreement: Tensor | None = None


class StepStatsVector:
    """Packs a step's numbers into the vector that is summed over ranks, and unpacks the sum. The
    vector has one flag per parameter, a loss and a weight per microbatch, the numbers of
    `StepAgreement`, and one flag of this rank."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        max_microbatches: int,
        device: torch.device,
        agreement: StepAgreement | None = None,
    ) -> None:
        self._parameters = len(parameters)
        self._max_microbatches = max_microbatches
        self.dtype = (
            torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32
        )
        self._device = device
        self._agreement = agreement
        first = self._parameters + 2 * max_microbatches
        self._compared = slice(first, first + (0 if agreement is None else agreement.count))
        self.length = self._compared.stop + 1

    def pack(
        self,
        used: Sequence[float],
        share: range,
        values: Sequence[Number],
        weights: Sequence[Number] | None,
        flag: bool,
    ) -> Tensor:
        """Return this rank's vector, and end the step in `StepAgreement`. `used`: 1 for each
        parameter that this rank's microbatches used, else 0. `share`: indices of this rank's
        microbatches in the step. `values`, `weights`: the loss and the weight of each of them."""
        row = np.zeros(self.length, dtype=np.float64 if self.dtype is torch.float64 else np.float32)
        row[: self._parameters] = used
        if self._agreement is not None:
            row[self._compared] = self._agreement.numbers()
            self._agreement.end_step()
        row[-1] = flag
        columns = [
            (self._parameters, values),
            (self._parameters + self._max_microbatches, weights or []),
        ]
        if self._device.type == "cpu":
            for start, numbers in columns:
                if numbers:
                    row[_slice(start, share)] = [float(number) for number in numbers]
            return torch.from_numpy(row)
        packed = torch.from_numpy(row).pin_memory().to(self._device, non_blocking=True)
        for start, numbers in columns:
            if numbers:
                packed[_slice(start, share)] = self.column(numbers)
        return packed

    def own_numbers(self) -> Tensor | None:
        """Return the numbers of `StepAgreement` for a run on a single rank, where no vector is
        summed, and end the step there; None if nothing is compared."""
        if self._agreement is None or not self._agreement.count:
            return None
        numbers = torch.tensor(self._agreement.numbers())
        self._agreement.end_step()
        return numbers

    def unpack(self, summed: Tensor, count: int, *, weighted: bool) -> StepStats:
        """Unpack the sum of all ranks' vectors in a step of `count` microbatches. `weighted`: True
        if the ranks have packed weights."""
        first, second = self._parameters, self._parameters + self._max_microbatches
        weights = summed[second : second + count].clone() if weighted else None
        has_numbers = self._compared.stop > self._compared.start
        compared = summed[self._compared].clone() if has_numbers else None
        if accelerator.is_accelerator(summed):
            summed = summed.clone()
            values = summed[first : first + count]
            return StepStats(summed[:first], values, weights, summed[-1], compared)
        if count > _MAX_LIST_LENGTH:
            return StepStats(
                summed[:first].tolist(),
                summed[first : first + count].clone(),
                weights,
                bool(summed[-1]),
                compared,
            )
        numbers = summed.tolist()
        return StepStats(
            numbers[:first], numbers[first : first + count], weights, bool(numbers[-1]), compared
        )

    def column(self, numbers: Sequence[Number]) -> Tensor:
        """Return the microbatches' losses or weights as one tensor: shape (len(numbers),)."""
        if isinstance(numbers[0], float):
            return torch.tensor(numbers, dtype=self.dtype)
        return torch.stack([number for number in numbers if isinstance(number, Tensor)]).to(
            self.dtype
        )


class UnusedParameters:
    """Sets a parameter's `.grad` to None if no microbatch of any rank used it, because weight decay
    or momentum would otherwise change the parameter.

    A rank that did not use some parameters must know whether another rank used them. Reading this
    from the summed vector on an accelerator would make the host wait for the device. So if any rank
    left parameters unused in the previous step, the hosts exchange their flags directly.
    """

    def __init__(self, parameters: Sequence[Tensor], world: World) -> None:
        """`world`: the ranks over which gradients are summed."""
        self._parameters = parameters
        self._world = world
        self._before: tuple[Tensor, torch.Event] | None = None
        """The flag "some rank left parameters unused in the previous step", while it is copied to
        the host, and the event of that copy; None before the first step."""

    def clear(self, used: Sequence[float], stats: StepStats) -> None:
        """Set the gradients of parameters that no rank used to None. Every rank calls it. `used`: 1
        for each parameter that this rank's microbatches used, else 0. `stats`: the step's numbers
        of all ranks."""
        summed: Sequence[float] | Tensor = stats.used
        if (
            isinstance(summed, Tensor)
            and accelerator.has_streams(summed.device)
            and self._note(summed)
        ):
            mine = torch.tensor(used)
            self._world.all_reduce(mine)
            summed = mine
        if all(used):
            return
        for parameter, was_used in zip(
            self._parameters, summed.tolist() if isinstance(summed, Tensor) else summed, strict=True
        ):
            if not was_used:
                parameter.grad = None

    def _note(self, summed: Tensor) -> bool:
        """Start to copy to the host, for the next step, if some rank left parameters unused in this
        step. `summed`: for each parameter, the number of ranks that used it. Returns True, on all
        ranks, if some rank left parameters unused in the previous step."""
        before = self._before
        copied = (summed < self._world.size).any().to("cpu", non_blocking=True)
        self._before = copied, accelerator.recorded_event(summed.device)
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0])


def _slice(start: int, share: range) -> slice:
    return slice(start + share.start, start + share.stop, share.step)
