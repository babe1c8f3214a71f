"""What a step has to say beyond gradients, as one vector that is summed over ranks.

Each number is written by one rank and is zero on the others, so its sum is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_MOST_IN_A_LIST = 256
"""Values on the host: fewer are sooner looked at in a list, more in a tensor."""
Number = Tensor | float
"""A scalar tensor, or a number that the host knows already."""


class Told(NamedTuple):
    """What all ranks together said."""

    used: Tensor | list[float]
    """(parameters,): 0 where no microbatch used it."""
    values: Tensor | list[float]
    """(microbatches,): what was recorded of each."""
    weights: Tensor | None
    """(microbatches,), where weights were given."""
    stops: Tensor | bool
    """How many ranks raised the flag, or whether any did, of those who share out the microbatches."""


class Slots:
    """The places of the numbers: a flag for each parameter, a value and a weight for each microbatch, one flag for all."""

    def __init__(self, parameters: int, most_microbatches: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._parameters = parameters
        self._most = most_microbatches
        self._dtype = dtype
        self._device = device
        self.length = parameters + 2 * most_microbatches + 1

    def say(self, used: Sequence[float], share: range, values: Sequence[Number], weights: Sequence[Number] | None, flag: bool) -> Tensor:
        """This rank's numbers in their places, zeros in the others'. `values` and `weights`: one for each microbatch of `share`."""
        row = np.zeros(self.length, dtype=np.float64 if self._dtype is torch.float64 else np.float32)
        row[: self._parameters] = used
        row[-1] = flag
        columns = [(self._parameters, values), (self._parameters + self._most, weights or [])]
        if self._device.type == "cpu":
            for start, numbers in columns:
                if numbers:
                    row[_slice(start, share)] = [float(number) for number in numbers]
            return torch.from_numpy(row)
        said = torch.from_numpy(row).pin_memory().to(self._device, non_blocking=True)
        for start, numbers in columns:
            if numbers:
                said[_slice(start, share)] = self.column(numbers)
        return said

    def read(self, received: Tensor, count: int, *, weighted: bool) -> Told:
        """What the ranks said, from its sum over them."""
        first, second = self._parameters, self._parameters + self._most
        weights = received[second : second + count].clone() if weighted else None
        if received.is_cuda:
            received = received.clone()
            return Told(received[:first], received[first : first + count], weights, received[-1])
        if count > _MOST_IN_A_LIST:
            return Told(received[:first].tolist(), received[first : first + count].clone(), weights, bool(received[-1]))
        numbers = received.tolist()
        return Told(numbers[:first], numbers[first : first + count], weights, bool(numbers[-1]))

    def column(self, numbers: Sequence[Number]) -> Tensor:
        if isinstance(numbers[0], float):
            return torch.tensor(numbers, dtype=self._dtype)
        return torch.stack([number for number in numbers if isinstance(number, Tensor)]).to(self._dtype)


def forget_unused(parameters: Sequence[Tensor], told: Told) -> None:
    """A gradient of zeros is not the absence of one: AdamW would decay the weight, momentum would move it."""
    used = told.used if isinstance(told.used, list) else told.used.tolist()
    for parameter, was_used in zip(parameters, used, strict=True):
        if not was_used:
            parameter.grad = None


def _slice(start: int, share: range) -> slice:
    return slice(start + share.start, start + share.stop, share.step)
