"""A sum over ranks of which each sends its numbers in fewer bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.hosts import Hosts
from lockstep.comm.quantize import BLOCK, Rounding, numbers_in
from lockstep.comm.shared_memory import SharedGroup
from lockstep.comm.world import World, all_gather_single


@dataclass(frozen=True, slots=True)
class Senders:
    """Those whose numbers are compressed: all ranks; or, of several hosts of which some have several ranks, the first rank of each, for all
    of its host, whose numbers it is given in full."""

    group: Any
    """Torch's, of the senders. None: all processes."""
    rank: int
    size: int
    memory: SharedGroup | None
    """What exchanges bytes between the senders instead of `group`."""
    hosts: Hosts | None
    """Where a sender stands for a host."""

    @classmethod
    def of(cls, world: World) -> Senders:
        """For ranks that exchange CPU or GPU tensors. `world.size` is at least 2."""
        hosts = world.hosts
        if hosts is None:
            return cls(world.group, world.rank, world.size, world.memory, None)
        return cls(hosts.between, 0 if hosts.between is None else dist.get_rank(hosts.between), len(hosts.firsts), None, hosts)

    @property
    def is_one(self) -> bool:
        """Whether this rank is one of them."""
        return self.hosts is None or self.hosts.between is not None

    @property
    def inside(self) -> SharedGroup | None:
        """The memory of the ranks for which one of them sends; None where there are no others."""
        return None if self.hosts is None else self.hosts.memory


class RoundedSum:
    """The sum of one vector under way, the same bits on every sender. All start, fold and finish the same sums in the same order.

    Each sender rounds its vector and sends a slice to each; each adds its slice up in float32, in the order of the senders, rounds the
    sum and sends it to all. So a number is rounded twice, whatever the number of senders.
    """

    def __init__(self, rounding: Rounding, senders: Senders, *, keeps: bool) -> None:
        """`keeps`: whether `left` is wanted."""
        self._rounding = rounding
        self._senders = senders
        self._keeps = keeps

    def start(self, numbers: Tensor, exact: Tensor) -> None:
        """Both float32 and flat. `exact` is not rounded."""
        size = self._senders.size
        rows = _in_rows(numbers, size, BLOCK)
        sent = self._rounding.encode(rows)
        if self._keeps:
            self.left = rows - self._rounding.decode(sent)
            """What rounding took from this sender's numbers, (senders, each); once folded, also from the sum of its slice."""
        outgoing = torch.cat([_in_rows(exact, size, 1).view(torch.uint8), sent], dim=1)
        self._exact_bytes = outgoing.shape[1] - sent.shape[1]
        self._received = torch.empty_like(outgoing)
        self._work: dist.Work | None = None
        if self._senders.memory is not None:
            sizes = [outgoing.shape[1]] * size
            self._senders.memory.all_to_all(self._received.view(-1), outgoing.view(-1), sizes, sizes)
        else:
            self._work = dist.all_to_all_single(self._received, outgoing, group=self._senders.group, async_op=True)

    def fold(self) -> None:
        """Add up this sender's slice and send the sum to all."""
        exact, numbers = (_added(part) for part in self._parts())
        sent = self._rounding.encode(numbers)
        if self._keeps:
            self.left[self._senders.rank] += (numbers - self._rounding.decode(sent))[0]
        mine = torch.cat([exact.view(torch.uint8), sent], dim=1)
        self._received = mine.new_empty(self._senders.size, mine.shape[1])
        if self._senders.memory is not None:
            self._senders.memory.all_gather(self._received.view(-1), mine.view(-1))
        else:
            self._work = all_gather_single(self._received, mine, group=self._senders.group, async_op=True)

    def finish(self, numbers: Tensor, exact: Tensor) -> None:
        """Put the sums where they belong."""
        parts = self._parts()
        exact.copy_(parts[0].reshape(-1)[: exact.numel()])
        numbers.copy_(parts[1].reshape(-1)[: numbers.numel()])

    def _parts(self) -> tuple[Tensor, Tensor]:
        """The exact numbers and the others of each row received, once they are here."""
        if self._work is not None:
            self._work.wait()
        exact, numbers = self._received[:, : self._exact_bytes], self._received[:, self._exact_bytes :]
        return numbers_in(exact, torch.float32), self._rounding.decode(numbers)


def _in_rows(numbers: Tensor, rows: int, multiple: int) -> Tensor:
    """One after another, each a multiple of so many, with zeros at the end."""
    each = -(-numbers.numel() // (rows * multiple)) * multiple
    padded = numbers.new_zeros(rows * each)
    padded[: numbers.numel()] = numbers
    return padded.view(rows, each)


def _added(rows: Tensor) -> Tensor:
    """Their sum in their order, (1, ...)."""
    total = rows[:1].clone()
    for row in rows[1:]:
        total += row
    return total
