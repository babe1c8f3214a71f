"""The hook that writes the checksum of the gradient at each logging step. Two runs with the same
checksums have computed the same gradients."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lockstep.comm.mesh import to_local
from lockstep.training.hook import ControlHook
from lockstep.training.run import Run

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
PIECE_ELEMENTS = 2**16
"""Number of elements that are summed at once on a CPU. Torch first copies the elements as 64-bit
numbers, and the copy fits the cache."""
Part = tuple[int, Tensor]
"""A factor that depends on the parameter's name, and the sum of the bits of the parameter's
gradient."""


class GradientChecksum(ControlHook):
    def __init__(self) -> None:
        self._parts: list[Part] | None = None

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
        self._parts = [*(self._parts or ()), *gradient_sums(counted, run.context.device)]

    def between_steps(self, run: Run) -> None:
        if not run.is_logging_step:
            return
        if self._parts is None:
            run.training.checksum = None
            return
        total, self._parts = checksum_of(self._parts), None
        world = run.context.mesh.world
        if world.size > 1:
            as_signed = total - 2**64 if total >= 2**63 else total
            sums = torch.tensor([as_signed], device=run.context.device)
            world.all_reduce(sums)
            total = int(sums.item()) % 2**64
        run.training.checksum = f"{total:016x}"


def gradient_sums(gradients: Iterable[tuple[str, Tensor]], device: torch.device) -> list[Part]:
    """Sum the bits of each gradient. The sums of a tensor's shards add up to the tensor's sum."""
    parts: list[Part] = []
    for name, gradient in gradients:
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        words = real.detach().contiguous().view(_WORDS[real.element_size()])
        cut = words.is_cpu and words.numel() > PIECE_ELEMENTS
        pieces = torch.split(words.view(-1), PIECE_ELEMENTS) if cut else [words]
        parts += [(_factor(name), piece.sum(dtype=torch.int64).to(device)) for piece in pieces]
    return parts


def checksum_of(parts: Sequence[Part]) -> int:
    """Return the total of factor × sum, modulo 2**64. Waits for the device once."""
    if all(each.is_cpu for _, each in parts):
        return sum([factor * int(each) for factor, each in parts]) % 2**64
    sums: list[int] = torch.stack([each for _, each in parts]).tolist()
    return sum([factor * each for (factor, _), each in zip(parts, sums, strict=True)]) % 2**64


@functools.cache
def _factor(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 | 1
