"""Sums vectors (such as gradients) over microbatches in a fixed order, so that the bits do not
depend on the world size. The order is a binary tree whose leaves are the microbatches. An
all-to-all sends each slice of the vectors to one rank, which adds them in the order of the tree. An
all-gather distributes the sums. A rank with k nodes of the tree sends k times as many bytes in the
all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import tree
from lockstep.comm.world import World


@dataclass(frozen=True, slots=True)
class TreeNodes:
    """The nodes of the summation tree over `count` microbatches that each rank can compute without
    communication."""

    count: int
    nodes: tuple[tuple[tuple[int, int], ...], ...]
    """The nodes of each rank. A node is the range [start, stop) of its microbatches."""

    @classmethod
    def of(cls, shares: Sequence[range]) -> TreeNodes:
        count = sum(map(len, shares))
        return cls(
            count, tuple(tuple(tree.cover(share.start, share.stop, count)) for share in shares)
        )


class OrderedSum:
    """Sums one vector over all microbatches of all ranks, in the order of the summation tree. Every
    rank calls `start`, `fold` and `finish` of the same sums in the same order."""

    def __init__(
        self,
        nodes: Sequence[Tensor],
        tree_nodes: TreeNodes,
        world: World,
    ) -> None:
        self._shared_memory = world.shared_memory
        self._group = world.group
        self._rank = world.rank
        self._tree_nodes = tree_nodes
        self._nodes = nodes

    def start(self, length: int, like: Tensor) -> None:
        """`like` is a tensor with the vector's dtype and device, for a rank without nodes."""
        world = len(self._tree_nodes.nodes)
        self._chunk = -(-length // world)
        self._length = length
        starts = [min(rank * self._chunk, length) for rank in range(world + 1)]
        bounds = list(pairwise(starts))
        self._width = starts[self._rank + 1] - starts[self._rank]
        if len(self._nodes) == 1:
            self._outgoing = self._nodes[0]
        else:
            parts = [node[start:stop] for start, stop in bounds for node in self._nodes]
            self._outgoing = torch.cat(parts or [like.new_empty(0)])
        into = [len(nodes) * self._width for nodes in self._tree_nodes.nodes]
        outof = [(stop - start) * len(self._nodes) for start, stop in bounds]
        self._incoming = like.new_empty(sum(into))
        if self._shared_memory is not None:
            self._shared_memory.all_to_all(self._incoming, self._outgoing, into, outof)
        else:
            self._work = dist.all_to_all_single(
                self._incoming, self._outgoing, into, outof, self._group, async_op=True
            )

    def fold(self) -> None:
        self._wait()
        spans = [span for nodes in self._tree_nodes.nodes for span in nodes]
        parts: list[Tensor] = list(self._incoming.view(len(spans), self._width))
        total = tree.fold(spans, parts, self._tree_nodes.count, Tensor.add_)
        mine = total.new_zeros(self._chunk)
        mine[: self._width] = total
        self._gathered = total.new_empty(self._chunk * len(self._tree_nodes.nodes))
        if self._shared_memory is not None:
            self._shared_memory.all_gather(self._gathered, mine)
        else:
            self._work = dist.all_gather_single(self._gathered, mine, self._group, async_op=True)

    def finish(self) -> Tensor:
        self._wait()
        return self._gathered[: self._length]

    def _wait(self) -> None:
        if self._shared_memory is None:
            self._work.wait()
