"""The hook that writes the checksum of the gradient of each logging step. Two runs that have the
same checksums have computed the same gradients."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lockstep.comm.mesh import to_local
from lockstep.training.hook import ControlHook
from lockstep.training.run import Run

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes of an element -> the dtype in which its bits are summed."""
PIECE_ELEMENTS = 2**16
"""Number of elements summed at once on a CPU, where torch first copies them as 64-bit numbers: this
copy fits the cache."""


class GradientChecksum(ControlHook):
    """Sums the bits of the gradients of all models, before clipping. Every rank runs it."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def after_backward(self, run: Run, model: nn.Module) -> None:
        if not run.is_logging_step:
            return
        mesh = run.context.mesh
        module = next(each for each in run.training.modules if each.model is model)
        counted = [
            (name, to_local(gradient))
            for name, gradient in module.counted_gradients()
            if mesh.is_first(gradient)
        ]
        self._sums.append(checksum_of(counted, run.context.device))

    def between_steps(self, run: Run) -> None:
        if not run.is_logging_step:
            return
        if not self._sums:  # the script has skipped every model
            run.training.checksum = None
            return
        total, self._sums = torch.stack(self._sums).sum().reshape(1), []
        run.context.mesh.world.all_reduce(total)
        run.training.checksum = f"{total.item() % 2**64:016x}"


def checksum_of(gradients: Iterable[tuple[str, Tensor]], device: torch.device) -> Tensor:
    """Return the sum, modulo 2**64, of the bits of all elements, times a number that follows from
    the tensor's name. A scalar of int64 on `device`.

    The sum has no order: the parts of a tensor have together the checksum of the tensor.
    """
    sums: list[Tensor] = []
    factors: list[int] = []
    for name, gradient in gradients:
        parts = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        words = parts.detach().contiguous().view(_WORDS[parts.element_size()])
        cut = words.is_cpu and words.numel() > PIECE_ELEMENTS
        pieces = torch.split(words.view(-1), PIECE_ELEMENTS) if cut else [words]
        sums += [piece.sum(dtype=torch.int64).to(device) for piece in pieces]
        factors += [_factor(name)] * len(pieces)
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (torch.stack(sums) * torch.tensor(factors, device=device)).sum()


@functools.cache
def _factor(name: str) -> int:
    """Return an odd number of 63 bits that depends on the name."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 | 1
