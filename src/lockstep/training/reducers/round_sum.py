"""The bitwise sum of gradients over all microbatches of a step, round by round.

In round r, rank d of the n data-parallel ranks computes microbatch r * n + d. After each backward,
an all-to-all sends every rank its slice of the round's gradients. Each rank adds the received
slices in the order of a binary tree. After the last round, the ranks all-gather their slices of the
sum.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lockstep.comm.world import World
from lockstep.tree import Counter


class RoundSum:
    """Sums the gradients of some parameters over microbatches and ranks. Every rank makes the same
    calls."""

    def __init__(self, world: World, replicas: World, label: str = "") -> None:
        self._world = world
        self._replicas = replicas
        memory = world.shared_memory
        self._label = memory.label(label) if memory is not None else 0

    def begin(self, count: int) -> None:
        self._remaining = count
        self._counter: Counter[Tensor] = Counter(Tensor.add_, start=0, count=count)
        self._leaves: Tensor | None = None

    def add(self, given: Tensor) -> None:
        """`given` has the shape (microbatches, shards, elements of a shard). Each call adds
        gradients to the current round."""
        microbatches, shards, self._numbers = given.shape
        replicas = self._replicas.size
        width = -(-self._numbers // replicas)
        if missing := width * replicas - self._numbers:
            given = F.pad(given, (0, missing))
        given = given.view(microbatches, shards, replicas, width).permute(2, 1, 0, 3).contiguous()
        # NCCL, and Gloo from torch 2.15 on, divide the first dim between ranks
        sent = given.view(replicas * shards, -1)
        leaves = self._world.all_to_all(sent, label=self._label).view(-1, width)
        self._leaves = leaves if self._leaves is None else self._leaves.add_(leaves)

    @property
    def is_round_empty(self) -> bool:
        return self._leaves is None

    def end_round(self) -> None:
        """The dummy microbatches are the last microbatches of the last round, and are dropped."""
        assert self._leaves is not None, "add comes first"
        for leaf in self._leaves[: max(0, self._remaining)]:
            self._counter.push(leaf)
        self._remaining -= len(self._leaves)
        self._leaves = None

    def finish(self) -> Tensor:
        (root,) = self._counter.values
        return self._replicas.gather_rows(root, [len(root)] * self._replicas.size)[: self._numbers]
