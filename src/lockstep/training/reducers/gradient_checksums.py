"""The checksums of the gradient of one microbatch."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.training.checksum import checksum, on_cpu


class GradientChecksums:
    """Collects the checksum of each parameter's gradient while a reducer computes a backward."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(self, place: int, gradient: Tensor) -> None:
        """Add a gradient of the parameter at `place`. It is called again if a backward computes the
        gradient in several parts."""
        found = checksum(gradient)
        self._sums[place] = self._sums[place] + found if place in self._sums else found

    def of(self, parameters: int) -> Tensor:
        """Return the checksum for each of `parameters` places, on the CPU; 0 where there was no
        gradient. Waits for the device."""
        found = torch.zeros(parameters, dtype=torch.int64)
        if self._sums:
            found[list(self._sums)] = on_cpu(list(self._sums.values()))
        return found
