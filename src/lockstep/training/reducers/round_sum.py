"""The sum of gradients over all microbatches of a step, round by round, in the order of
`lockstep.tree`.

In round r, rank d of the n data ranks has microbatch r * n + d. A gradient is divided into shards,
and each shard into one slice for each of its replicas. After each backward, an all-to-all sends
every rank the leaves of its slice, which it pushes into a binary counter. After the last round, the
replicas of a shard all-gather their slices of the sum.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lockstep.comm.world import World
from lockstep.tree import Counter


class RoundSum:
    """The sum of some parameters' gradients. Every rank of `world` makes the same calls."""

    def __init__(self, world: World, replicas: World, label: str = "") -> None:
        """`world`: the ranks over which the gradients are summed. `replicas`: the ranks among them
        that hold the same shard. `label`: the parameters' name in errors."""
        self._world = world
        self._replicas = replicas
        memory = world.shared_memory
        self._label = memory.label(label) if memory is not None else 0

    def begin(self, count: int) -> None:
        """Begin a step of `count` microbatches."""
        self._remaining = count
        self._counter: Counter[Tensor] = Counter(Tensor.add_, start=0, count=count)
        self._leaves: Tensor | None = None

    def add(self, given: Tensor) -> None:
        """Exchange the gradients of this rank's microbatches in the round: shape (microbatches,
        shards, elements of a shard). Several calls in a round add up."""
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
        """True if nothing was added in the round."""
        return self._leaves is None

    def end_round(self) -> None:
        """Push the leaves of the round. Dummies come last, and their gradients are dropped."""
        assert self._leaves is not None, "add comes first"
        for leaf in self._leaves[: max(0, self._remaining)]:
            self._counter.push(leaf)
        self._remaining -= len(self._leaves)
        self._leaves = None

    def finish(self) -> Tensor:
        """Return this rank's shard of the sum, after the last round."""
        (root,) = self._counter.values
        return self._replicas.gather_rows(root, [len(root)] * self._replicas.size)[: self._numbers]
