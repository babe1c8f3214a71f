"""All-reduce with compressed numbers: bf16, fp16 or int8 on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.hierarchical import HierarchicalAllReduce
from lockstep.comm.quantize import BLOCK, Rounding, numbers_in
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.comm.world import World


@dataclass(frozen=True, slots=True)
class Senders:
    """The ranks that exchange compressed numbers: all; or the leader of each host, if several hosts
    include one with several ranks. Leaders get the uncompressed numbers of their hosts' ranks."""

    group: Any
    """Torch's process group of the senders. None: all processes."""
    rank: int
    size: int
    shared_memory: SharedMemoryGroup | None
    """The senders' shared memory, used instead of `group`; None without it."""
    hierarchy: HierarchicalAllReduce | None

    @classmethod
    def of(cls, world: World) -> Senders:
        """Choose the senders for the ranks of `world`, at least 2. Every rank calls it."""
        hierarchy = world.hierarchy
        if hierarchy is None:
            return cls(world.group, world.rank, world.size, world.shared_memory, None)
        group = hierarchy.leader_group
        return cls(
            group,
            0 if group is None else dist.get_rank(group),
            len(hierarchy.leaders),
            None,
            hierarchy,
        )

    @property
    def includes_this_rank(self) -> bool:
        return self.hierarchy is None or self.hierarchy.leader_group is not None

    @property
    def host_shared_memory(self) -> SharedMemoryGroup | None:
        """The shared memory of the ranks with one sender; None if each rank is a sender."""
        return None if self.hierarchy is None else self.hierarchy.shared_memory


class CompressedAllReduce:
    """The all-reduce of one vector, with the same bits on every sender; all call the same in the
    same order. Each sends a compressed slice to every sender (all-to-all), sums its slice in
    float32 in the order of the senders, compresses the sum and sends it to all (all-gather). So
    each number is rounded twice, for any number of senders."""

    def __init__(self, rounding: Rounding, senders: Senders, *, keeps_residual: bool) -> None:
        """`keeps_residual`: set `residual`, for error feedback."""
        self._rounding = rounding
        self._senders = senders
        self._keeps_residual = keeps_residual

    def start(self, numbers: Tensor, exact: Tensor) -> None:
        """Send both vectors, which are float32 and flat. `exact` is not compressed."""
        size = self._senders.size
        rows = _in_rows(numbers, size, BLOCK)
        sent = self._rounding.encode(rows)
        if self._keeps_residual:
            self.residual = rows - self._rounding.decode(sent)
            """This sender's rounding errors, (senders, numbers each); after `fold` also those of
            its slice's sum."""
        outgoing = torch.cat([_in_rows(exact, size, 1).view(torch.uint8), sent], dim=1)
        self._exact_bytes = outgoing.shape[1] - sent.shape[1]
        self._received = torch.empty_like(outgoing)
        self._work: dist.Work | None = None
        if self._senders.shared_memory is not None:
            sizes = [outgoing.shape[1]] * size
            self._senders.shared_memory.all_to_all(
                self._received.view(-1), outgoing.view(-1), sizes, sizes
            )
        else:
            self._work = dist.all_to_all_single(
                self._received, outgoing, group=self._senders.group, async_op=True
            )

    def fold(self) -> None:
        """Sum this sender's slice and send the sum to all."""
        exact, numbers = (_added(part) for part in self._parts())
        sent = self._rounding.encode(numbers)
        if self._keeps_residual:
            self.residual[self._senders.rank] += (numbers - self._rounding.decode(sent))[0]
        mine = torch.cat([exact.view(torch.uint8), sent], dim=1)
        self._received = mine.new_empty(self._senders.size, mine.shape[1])
        if self._senders.shared_memory is not None:
            self._senders.shared_memory.all_gather(self._received.view(-1), mine.view(-1))
        else:
            self._work = dist.all_gather_single(
                self._received, mine, group=self._senders.group, async_op=True
            )

    def finish(self, numbers: Tensor, exact: Tensor) -> None:
        """Wait for the sums and copy them into `numbers` and `exact`."""
        parts = self._parts()
        exact.copy_(parts[0].reshape(-1)[: exact.numel()])
        numbers.copy_(parts[1].reshape(-1)[: numbers.numel()])

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Wait for the received rows, and return the exact and the decompressed numbers of each."""
        if self._work is not None:
            self._work.wait()
        exact, numbers = (
            self._received[:, : self._exact_bytes],
            self._received[:, self._exact_bytes :],
        )
        return numbers_in(exact, torch.float32), self._rounding.decode(numbers)


def _in_rows(numbers: Tensor, rows: int, multiple: int) -> Tensor:
    """Return the numbers as `rows` rows of one length, a multiple of `multiple`, padded with zeros
    at the end."""
    each = -(-numbers.numel() // (rows * multiple)) * multiple
    padded = numbers.new_zeros(rows * each)
    padded[: numbers.numel()] = numbers
    return padded.view(rows, each)


def _added(rows: Tensor) -> Tensor:
    """Return the sum of the rows, added in their order: (1, ...)."""
    total = rows[:1].clone()
    for row in rows[1:]:
        total += row
    return total
