from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.compared_bits import BITS, compared_bits
from lockstep.comm.world import World
from lockstep.model.context.exchange import TokenLayout


class PartDigests:
    """Digests of the values that a step's forwards have read. Sums of the digests over ranks show
    if all ranks that divide a sequence's tokens have read the same values."""

    count = BITS

    def __init__(self, world: World, *, is_summed: bool) -> None:
        """`is_summed` is True if training already sums a step's numbers, such as losses, over the
        ranks of `world`."""
        self.ranks = [0] if world.size == 1 else dist.get_process_group_ranks(world.group)
        """The global ranks of the axis."""
        self._world = world
        self._is_summed = is_summed
        self._sums = [0.0] * BITS

    def add(self, forward: int, layout: TokenLayout, digest: Any) -> None:
        digest = digest.copy()
        digest.update(repr((forward, self.ranks[0])).encode())
        number = int.from_bytes(digest.digest()[: BITS // 8], "little")
        bits = compared_bits(number, rank=layout.world.rank, size=layout.world.size)
        self._sums = [total + bit for total, bit in zip(self._sums, bits, strict=True)]

    def numbers(self) -> list[float]:
        """Return numbers whose sums over all ranks are 0 if and only if all ranks have read the
        same values in each forward. Every rank of `world` must call this method."""
        sums = torch.tensor(self._sums, dtype=torch.float64)
        if not self._is_summed:
            self._world.all_reduce(sums)
        numbers: list[float] = sums.tolist()
        return numbers

    def clear(self) -> None:
        self._sums = [0.0] * BITS
