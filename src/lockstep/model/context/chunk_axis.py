from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from lockstep.assignment import contiguous_range
from lockstep.comm.world import World
from lockstep.model.context.chunk_threads import ChunkThreads
from lockstep.tree import Counter, cover, fold


@dataclass(frozen=True)
class ChunkAxis:
    """The chunks of a sequence, in place of the ranks of an axis. The paired order of chunks is
    first, last, second, last but one, and so on. A process has several chunks, and computes each
    chunk in a separate thread."""

    rank: int
    """The index, in paired order, of the chunk that the calling thread computes."""
    size: int
    processes: World
    """The processes of the axis `context`. Each process has chunks that are consecutive in paired
    order."""
    threads: ChunkThreads

    @property
    def device(self) -> torch.device:
        return self.processes.device

    @cached_property
    def shares(self) -> list[range]:
        processes = self.processes.size
        return [contiguous_range(self.size, rank, processes) for rank in range(processes)]

    @property
    def own_share(self) -> range:
        return self.shares[self.processes.rank]

    def gather_rows(self, rows: Tensor, counts: Sequence[int], order: Tensor) -> Tensor:
        """Every chunk's thread must call this method."""

        def answer(parts: list[Tensor]) -> list[Tensor]:
            each = [sum(counts[share.start : share.stop]) for share in self.shares]
            everything = self.processes.gather_rows(torch.cat(parts), each)
            return [everything.index_select(0, order)] * len(parts)

        gathered: Tensor = self.threads.meet("keys of all chunks", rows, answer)
        return gathered

    def sum_rows(self, rows: Tensor, counts: Sequence[int], order: Tensor) -> Tensor:
        """Each chunk's thread passes `rows` for all chunks, and gets the sum of the rows of its
        chunk. The sum is a fixed binary tree over the chunks, so the bits do not depend on the
        number of processes."""
        own = self.own_share

        def answer(total: _RowSum) -> Sequence[Tensor]:
            each = [sum(counts[share.start : share.stop]) for share in self.shares]
            nodes = [node.index_select(0, order) for node in total.counter.values]
            summed = _over_processes(nodes, self.shares, each, self.processes)
            return torch.split(summed, list(counts[own.start : own.stop]))

        collect = partial(_RowSum, own.start, self.size)
        summed: Tensor = self.threads.meet("gradients of keys", rows, answer, collect)
        return summed


class _RowSum:
    def __init__(self, start: int, count: int) -> None:
        self.counter: Counter[Tensor] = Counter(torch.add, start=start, count=count)

    def append(self, rows: Tensor) -> None:
        self.counter.push(rows)


def _over_processes(
    nodes: Sequence[Tensor], shares: Sequence[range], counts: Sequence[int], processes: World
) -> Tensor:
    """Every process must call this function."""
    if processes.size == 1:
        return nodes[0]
    covers = [cover(share.start, share.stop, shares[-1].stop) for share in shares]
    mine = torch.stack(list(nodes))
    shape, own = mine.shape[2:], counts[processes.rank]
    outgoing = [part.reshape(-1) for part in torch.split(mine, list(counts), 1)]
    sizes = [len(nodes) * own * shape.numel() for nodes in covers]
    incoming = processes.all_to_all(torch.cat(outgoing), sizes, list(map(len, outgoing)))
    all_nodes = [node for theirs in covers for node in theirs]
    values = list(incoming.view(len(all_nodes), own, *shape))
    summed: Tensor = fold(all_nodes, values, shares[-1].stop, Tensor.add_)
    return summed
