"""Compares an integer digest between the ranks of a group by sums over the ranks, so that the
comparison can be part of an all-reduce that is made anyway."""

from __future__ import annotations

BITS = 24
"""Number of bits of a digest that are compared."""


def compared_bits(digest: int, *, rank: int, size: int) -> list[float]:
    """Return `BITS` numbers that encode the digest of rank `rank`. Their sums over the `size` ranks
    are 0 if and only if all ranks' digests agree."""
    factor = size - 1 if rank == 0 else -1
    return [float(factor * (digest >> bit & 1)) for bit in range(BITS)]
