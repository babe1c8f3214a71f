"""A step on one rank as values: operations and collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["matmul", "convolution", "attention", "memory"]
Phase = Literal["forward", "backward", "recompute", "update", "other"]
CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"
]

ALIGNED = 128
"""Bytes of a line of memory."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel."""

    kind: Kind
    """`memory`: the time is that of moving bytes."""
    dtype: str
    """Dtype of the arithmetic, such as `bfloat16`."""
    flops: int
    """Two for each multiplication and addition; 0 for `memory`."""
    bytes: int
    """Read and written."""
    shape: tuple[int, ...] = ()
    """matmul: (batch, m, n, k). attention: (batch × heads, queries, keys, head dim). convolution:
    (groups, m, n, k) of the forward's product. Else empty."""
    phase: Phase = "other"
    name: str = ""
    """Torch's name, such as `aten.mm`."""
    aligned_bytes: int = ALIGNED
    """matmul: the power of two, at most 128, that divides the bytes of each row."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective or message on one rank."""

    kind: CollectiveKind
    ranks: int
    """Size of its group."""
    stride: int
    """Distance of neighbours in the group, in ranks."""
    bytes: int
    """Bytes of the full tensor: what all_reduce sums, all_gather returns, reduce_scatter is given.
    all_to_all: this rank's. broadcast, send: the message's."""
    axis: str = ""
    phase: Phase = "other"


def sent_bytes(collective: Collective) -> int:
    """Return the least bytes that a rank sends: ring algorithms, or the message."""
    n, total = collective.ranks, collective.bytes
    match collective.kind:
        case "all_reduce":
            return 2 * total * (n - 1) // n
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return total * (n - 1) // n
        case _:
            return total
