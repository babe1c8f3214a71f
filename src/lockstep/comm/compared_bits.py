"""Compares an integer digest between ranks by a sum, which can be part of another all-reduce."""

from __future__ import annotations

BITS = 24


def compared_bits(digest: int, *, rank: int, size: int) -> list[float]:
    """Encode a digest as `BITS` numbers. The sums of these numbers over all ranks are 0 if and only
    if all ranks have the same digest."""
    factor = size - 1 if rank == 0 else -1
    return [float(factor * (digest >> bit & 1)) for bit in range(BITS)]
