"""The order of a rank's exchanges in one process group, which all ranks of the group must share.

Shared memory compares the label of each exchange. Gloo and NCCL compare nothing: exchanges of
different blocks that have one size give wrong sums. So each rank keeps a digest of the order of its
exchanges, and the ranks compare it with the numbers of each step.
"""

from __future__ import annotations

import zlib

import torch.distributed as dist

from lockstep.base.errors import RecipeError
from lockstep.comm.world import World
from lockstep.model.shard import error_of_order

BITS = 24
"""Bits of the digest that are compared."""


class ExchangeOrder:
    """The order of this rank's exchanges over `world`."""

    def __init__(self, world: World, summed: World) -> None:
        """Every rank of `summed`, the ranks that sum the numbers of a step, makes one. They
        contain `world`."""
        first = min(dist.get_process_group_ranks(world.group))
        groups = sorted(set(summed.gather_values(first)))
        self._world = world
        self._place = groups.index(first)
        self._groups = len(groups)
        self._labels: list[str] = []
        self._digest = 0
        self._calls: list[int] = []
        self._before: list[int] = []

    def label(self, text: str) -> int:
        """Return the number of an exchange. Every rank gives the same texts in the same order."""
        if text not in self._labels:
            self._labels.append(text)
        return self._labels.index(text)

    def note(self, label: int) -> None:
        """Note an exchange of this rank."""
        self._calls.append(label)
        self._digest = zlib.crc32(label.to_bytes(4, "little"), self._digest)

    @property
    def count(self) -> int:
        """Number of values that `numbers` returns."""
        return BITS * self._groups

    def numbers(self) -> list[float]:
        """Return the numbers of this rank's digest; see `numbers_of`."""
        return numbers_of(
            self._digest,
            rank=self._world.rank,
            size=self._world.size,
            group=self._place,
            groups=self._groups,
        )

    def end_step(self) -> None:
        """Keep the exchanges since the previous step, to be named if they differ."""
        self._before, self._calls = self._calls, []

    def difference(self) -> str | None:
        """Return the first difference between the ranks' exchanges in the last step; None if there
        is none. Every rank of `world` calls it."""
        everyone = self._world.gather_values(self._before)
        ranks = dist.get_process_group_ranks(self._world.group)
        for place in range(max(map(len, everyone))):
            called = [
                self._labels[each[place]] if place < len(each) else "ends the step"
                for each in everyone
            ]
            other = next((at for at, text in enumerate(called) if text != called[0]), None)
            if other is not None:
                return " and ".join(f"rank {ranks[at]} {called[at]}" for at in (0, other))
        return None

    def error(self, difference: str | None) -> RecipeError:
        return error_of_order(difference or "ranks gather or reduce different blocks")


def numbers_of(digest: int, *, rank: int, size: int, group: int, groups: int) -> list[float]:
    """Return numbers whose sums over all ranks of all groups are 0 exactly if the digests agree in
    each group. `rank`, `size`: of this rank's `group`."""
    factor = size - 1 if rank == 0 else -1
    row = [0.0] * (BITS * groups)
    for bit in range(BITS):
        row[group * BITS + bit] = float(factor * (digest >> bit & 1))
    return row
