"""Compares the digests of a group's ranks by sums over the ranks, so that the comparison can be
part of another sum."""

from __future__ import annotations

BITS = 24
"""Bits of a digest that are compared."""


def compared_bits(digest: int, *, rank: int, size: int) -> list[float]:
    """Return `BITS` numbers for a rank. Their sums over the `size` ranks are 0 if and only if the
    digests agree."""
    factor = size - 1 if rank == 0 else -1
    return [float(factor * (digest >> bit & 1)) for bit in range(BITS)]
