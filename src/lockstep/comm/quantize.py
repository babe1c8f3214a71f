"""Quantization for gradient compression: float32 to bytes and back. Pure: nothing is sent here."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
_LARGEST = {"fp16": 32752.0, "int8": 127.0}
"""The largest code of a block: for fp16 below its maximum, so that rounding stays in range."""
_INT8_DIVISOR = 127.0001
"""Slightly more than 127, so that 127 times the scale of float32's largest number is finite."""
_LEAST_SCALE = 2.0**-126
_EXPONENT = 0x7F800000
_SCALE_BYTES = 4


class Rounding:
    """The format `bf16`, `fp16` or `int8`. `bf16` has a relative error of at most 2**-8; numbers
    close to float32's largest become infinite. The others have a scale per block of `BLOCK`
    numbers. `fp16`, with a power of two as scale, has an error of at most 2**-11 of the number or
    2**-38 of the block's largest, `int8` of 1/254 of the block's largest, or 2**-127. A non-finite
    number makes its whole block non-finite; with `bf16`, only itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._dtype = _DTYPES[name]

    def bytes(self, numbers: int) -> int:
        """Return the bytes of an encoded row of `numbers`, a multiple of `BLOCK`."""
        return numbers * self._dtype.itemsize + (
            0 if self.name == "bf16" else numbers // BLOCK * _SCALE_BYTES
        )

    def encode(self, rows: Tensor) -> Tensor:
        """Return uint8 (rows, `bytes(numbers)`) of float32 (rows, numbers), a multiple of `BLOCK`
        in each row."""
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
        """Return the numbers that `encode` turned into these rows: float32, (rows, numbers)."""
        if self.name == "bf16":
            return numbers_in(sent, self._dtype).float()
        blocks = sent.shape[1] // self.bytes(BLOCK)
        scales, codes = torch.split(
            sent, [blocks * _SCALE_BYTES, blocks * BLOCK * self._dtype.itemsize], dim=1
        )
        numbers = numbers_in(codes, self._dtype).float().view(len(sent), blocks, BLOCK)
        return numbers.mul_(numbers_in(scales, torch.float32).unsqueeze(2)).view(
            len(sent), blocks * BLOCK
        )

    def _scales(self, largest: Tensor) -> Tensor:
        if self.name == "int8":
            return (largest / _INT8_DIVISOR).clamp_(min=_LEAST_SCALE)
        powers = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)
        return powers.mul_(2.0**-14).clamp_(min=_LEAST_SCALE)


def numbers_in(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of bytes, (rows, bytes) in any memory layout, as rows of `dtype`."""
    flat = torch.empty(sent.numel(), dtype=torch.uint8, device=sent.device)
    flat.view(sent.shape).copy_(sent)
    return flat.view(dtype).view(len(sent), sent.shape[1] // dtype.itemsize)
