"""The numbers of a step that ranks exchange together with the gradients: used parameters, losses,
weights, numbers that show if the ranks have made the same calls, and one flag. One vector contains
the numbers, and is summed over ranks. A step needs no collective in addition to the gradients'."""

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
"""Largest number of losses on the CPU that are returned as a list, which is faster to read than a
tensor."""
READY_TWICE = (
    "a parameter's gradient was ready twice in one backward, as with reentrant activation"
    " checkpointing; ranks sum each gradient once; pass use_reentrant=False to"
    " torch.utils.checkpoint.checkpoint"
)
Number = Tensor | float  # a scalar tensor, or a number if the host has it already


def gradient_versions(parameters: Sequence[Tensor]) -> list[tuple[int, int] | None]:
    """Return the id and the version counter of each gradient."""
    return [None if p.grad is None else (id(p.grad), version(p.grad)) for p in parameters]


class StepStats(NamedTuple):
    """The numbers of a step, combined over all ranks."""

    used: Tensor | list[float]  # (parameters,): 0 if no microbatch used the parameter
    values: Tensor | list[float]  # shape (microbatches,): each microbatch's loss
    weights: Tensor | None  # shape (microbatches,); None if the forward does not compute weights
    flags: Tensor | bool  # the number of ranks whose flag is set, or True if any is
    # shape (`StepAgreement.count`,): 0 if the ranks have made the same calls; None if not compared
    agreement: Tensor | None = None


class StepStatsVector:
    """A vector of one rank's numbers: a flag per parameter, a loss and a weight per microbatch, the
    numbers of `StepAgreement`, and one flag of the rank."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        max_microbatches: int,
        device: torch.device,
        agreement: StepAgreement,
    ) -> None:
        self._parameters = len(parameters)
        self._max_microbatches = max_microbatches
        self.dtype = (
            torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32
        )
        self._device = device
        self._agreement = agreement
        first = self._parameters + 2 * max_microbatches
        self._compared = slice(first, first + agreement.count)
        self.length = self._compared.stop + 1

    def pack(
        self,
        used: Sequence[float],
        share: range,
        values: Sequence[Number],
        weights: Sequence[Number] | None,
        flag: bool,
    ) -> Tensor:
        """Pack this rank's numbers into the vector, and end the step in `StepAgreement`."""
        row = np.zeros(self.length, dtype=np.float64 if self.dtype is torch.float64 else np.float32)
        row[: self._parameters] = used
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
        """Used on a single rank, where no vector is summed."""
        if not self._agreement.count:
            return None
        numbers = torch.tensor(self._agreement.numbers())
        self._agreement.end_step()
        return numbers

    def unpack(self, summed: Tensor, count: int, *, weighted: bool) -> StepStats:
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
        if isinstance(numbers[0], float):
            return torch.tensor(numbers, dtype=self.dtype)
        return torch.stack([number for number in numbers if isinstance(number, Tensor)]).to(
            self.dtype
        )


class UnusedParameters:
    """Sets a parameter's `.grad` to None if no microbatch of any rank used the parameter. With a
    zero gradient, weight decay or momentum would change an unused parameter. On an accelerator,
    reading the flags of all ranks would make the host wait for the device. The hosts exchange the
    flags if any rank left a parameter unused in the previous step."""

    def __init__(self, parameters: Sequence[Tensor], world: World) -> None:
        self._parameters = parameters
        self._world = world
        self._before: tuple[Tensor, torch.Event] | None = None
        """Flag that is being copied to the host: a rank left parameters unused in the previous
        step."""

    def clear(self, used: Sequence[float], stats: StepStats) -> None:
        """Every rank must call this method."""
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
        """Return True on all ranks if any rank left parameters unused in the previous step."""
        before = self._before
        copied = (summed < self._world.size).any().to("cpu", non_blocking=True)
        self._before = copied, accelerator.recorded_event(summed.device)
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0])


def _slice(start: int, share: range) -> slice:
    return slice(start + share.start, start + share.stop, share.step)
