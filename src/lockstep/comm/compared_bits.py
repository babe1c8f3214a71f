"""Digests that the ranks of a group compare by sums, which are part of other sums."""

from __future__ import annotations

BITS = 24
"""Bits of a digest that are compared."""


def compared_bits(digest: int, *, rank: int, size: int) -> list[float]:
    """Return `BITS` numbers of a rank. Their sums over the `size` ranks are 0 exactly if the
    digests agree."""
    factor = size - 1 if rank == 0 else -1
    return [float(factor * (digest >> bit & 1)) for bit in range(BITS)]
