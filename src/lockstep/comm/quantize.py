"""Numbers in fewer bytes, for the way between processes: float32 in, bytes out, and back. Pure: nothing is sent
here."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Numbers that have a scale in common."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
_LARGEST = {"fp16": 32752.0, "int8": 127.0}
"""What the largest number of a block comes near to, at most: fp16 has room above, so that no rounding leaves its
range."""
_A_LITTLE_MORE = 127.0001
"""So that 127 times the scale of float32's largest number is not beyond it."""
_LEAST_SCALE = 2.0**-126
_EXPONENT = 0x7F800000
"""The bits of a float32 that say its power of two."""
_SCALE_BYTES = 4


class Rounding:
    """One of `bf16`, `fp16` and `int8`.

    `bf16` rounds each number: off by at most 2**-8 of it; what is within that of float32's largest becomes infinite.
    The others have a scale for each block of `BLOCK` numbers, so that nothing is too large for them: `fp16` (a power of
    two) is off by at most 2**-11 of the number, or 2**-38 of the block's largest, whichever is more; `int8` by 1/254 of
    the block's largest, or by 2**-127.

    Of a block with a number that is not finite none comes out finite; in `bf16`, that number alone.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._dtype = _DTYPES[name]

    def bytes(self, numbers: int) -> int:
        """Of so many numbers, a multiple of `BLOCK`."""
        return numbers * self._dtype.itemsize + (0 if self.name == "bf16" else numbers // BLOCK * _SCALE_BYTES)

    def encode(self, rows: Tensor) -> Tensor:
        """`rows`: float32, (rows, numbers), a multiple of `BLOCK` of them.

        Returns uint8, (rows, `bytes(numbers)`), of any layout.
        """
        if self.name == "bf16":
            return rows.to(self._dtype).view(torch.uint8)
        blocks = rows.reshape(len(rows), rows.shape[1] // BLOCK, BLOCK)
        largest = blocks.abs().amax(dim=2, keepdim=True)
        scales = self._scales(largest)
        limit = _LARGEST[self.name]
        shrunk = (blocks / scales).clamp_(-limit, limit)
        codes = (shrunk.round_() if self._dtype is torch.int8 else shrunk).to(self._dtype)
        return torch.cat([part.flatten(1).view(torch.uint8) for part in (scales, codes)], dim=1)

    def decode(self, sent: Tensor) -> Tensor:
        """What `encode` gave, or some rows of it. Returns float32, (rows, numbers)."""
        if self.name == "bf16":
            return numbers_in(sent, self._dtype).float()
        blocks = sent.shape[1] // self.bytes(BLOCK)
        scales, codes = torch.split(sent, [blocks * _SCALE_BYTES, blocks * BLOCK * self._dtype.itemsize], dim=1)
        numbers = numbers_in(codes, self._dtype).float().view(len(sent), blocks, BLOCK)
        return numbers.mul_(numbers_in(scales, torch.float32).unsqueeze(2)).view(len(sent), blocks * BLOCK)

    def _scales(self, largest: Tensor) -> Tensor:
        if self.name == "int8":
            return (largest / _A_LITTLE_MORE).clamp_(min=_LEAST_SCALE)
        powers = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)
        return powers.mul_(2.0**-14).clamp_(min=_LEAST_SCALE)


def numbers_in(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """What is in rows of bytes, (rows, bytes), whatever their layout."""
    flat = torch.empty(sent.numel(), dtype=torch.uint8, device=sent.device)
    flat.view(sent.shape).copy_(sent)
    return flat.view(dtype).view(len(sent), sent.shape[1] // dtype.itemsize)
