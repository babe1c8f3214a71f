"""Operations and collectives: a step on one rank, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["matmul", "convolution", "attention", "memory"]
Phase = Literal["forward", "backward", "recompute", "update", "other"]
CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"
]

ALIGNED = 128
"""Bytes of a line of a device's memory."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel on the device."""

    kind: Kind
    """`memory`: all whose time is that of moving bytes."""
    dtype: str
    """That of the arithmetic, such as `bfloat16` or `float32`."""
    flops: int
    """Two for each multiplication and addition. 0 for `memory`."""
    bytes: int
    """Bytes read and written."""
    shape: tuple[int, ...] = ()
    """matmul: (batch, m, n, k). attention: (batch × heads, queries, keys, head dim). convolution:
    (groups, m, n, k) of the forward's matrix product. Else empty."""
    phase: Phase = "other"
    name: str = ""
    """Torch's name of it, such as `aten.mm`."""
    aligned_bytes: int = ALIGNED
    """matmul: the power of two, at most 128, that divides the bytes of each row of both operands
    and of the result."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, or one message, on one rank."""

    kind: CollectiveKind
    ranks: int
    """Size of its group."""
    stride: int
    """Distance of neighbours in the group, in ranks: with `ranks`, it says which links the
    collective crosses."""
    bytes: int
    """Bytes of the full tensor: of what all_reduce sums, what all_gather returns, and what
    reduce_scatter is given. all_to_all: what this rank gives. broadcast, send: the message."""
    axis: str = ""
    phase: Phase = "other"


def sent_bytes(collective: Collective) -> int:
    """The bytes that one rank sends at least, by the ring algorithms; for `broadcast` and `send`
    the message."""
    n, total = collective.ranks, collective.bytes
    match collective.kind:
        case "all_reduce":
            return 2 * total * (n - 1) // n
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return total * (n - 1) // n
        case _:
            return total
