"""Algorithm and bus bandwidth, as nccl-tests defines them. Pure.

From https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, with S the size in bytes, t the time and n the number of ranks:
algorithm bandwidth is S / t. Bus bandwidth is what a link between ranks must have carried for that, and can be held against the
hardware's: algorithm bandwidth times 2 (n - 1) / n for all-reduce, (n - 1) / n for reduce-scatter, all-gather and all-to-all, and 1 for
broadcast, reduce and send/recv; gather and scatter have (n - 1) / n in nccl-tests' code (src/gather.cu). S is the whole array: for
all-gather and gather what is received, for reduce-scatter, scatter and all-to-all what is sent, n times one rank's part.
"""

from __future__ import annotations

_PARTS = ("scatter", "gather", "all-gather", "reduce-scatter", "all-to-all")


def algorithm_bandwidth(size_bytes: int, seconds: float) -> float:
    """Bytes a second."""
    return size_bytes / seconds


def bus_bandwidth(collective: str, size_bytes: int, seconds: float, ranks: int) -> float:
    """Bytes a second; see the module's text. `collective`: one of `lockstep.doctor.definitions.COLLECTIVES`."""
    factor = 1.0
    if collective == "all-reduce":
        factor = 2 * (ranks - 1) / ranks
    elif collective in _PARTS:
        factor = (ranks - 1) / ranks
    return algorithm_bandwidth(size_bytes, seconds) * factor
