"""Assigns the tokens of a sequence to the ranks of the axis `context`.

A sequence is cut into chunks whose widths differ by at most one token. Ranks take contiguous shares
of the chunks in *paired order*: 0, last, 1, last but one, … Causal attention costs more for later
tokens, and every pair of chunks costs the same. The ranks' work is equal if their shares are whole
pairs.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lockstep.assignment import contiguous_range


def paired_order(chunks: int) -> list[int]:
    """Return the indices of a sequence's chunks as 0, last, 1, last but one, …"""
    return [place // 2 if place % 2 == 0 else chunks - 1 - place // 2 for place in range(chunks)]


def chunks_of(chunks: int, ranks: int, rank: int) -> list[int]:
    """Return the indices of a rank's chunks. If the numbers of chunks and of ranks are powers of
    two, each rank gets a subtree of the tree over the paired order."""
    share = contiguous_range(chunks, rank, ranks)
    return paired_order(chunks)[share.start : share.stop]


def spans(tokens: int, chunks: int, ranks: int, rank: int) -> tuple[range, ...]:
    """Return, for each chunk of a rank, the range of the chunk's tokens in the sequence."""
    return tuple(
        contiguous_range(tokens, chunk, chunks) for chunk in chunks_of(chunks, ranks, rank)
    )


@lru_cache(maxsize=64)
def places(tokens: int, chunks: int, ranks: int, rank: int) -> NDArray[np.int64]:
    """Return the indices of a rank's tokens in the sequence, in the order in which the rank holds
    them. The array is read-only."""
    found = np.concatenate(
        [np.arange(each.start, each.stop) for each in spans(tokens, chunks, ranks, rank)]
    )
    found.flags.writeable = False
    return found
