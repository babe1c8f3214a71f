"""The sum of gradients over all microbatches of a step, round by round, in the order of
`lockstep.tree`.

In each round, every rank computes one microbatch: in round r, rank d of the n data-parallel ranks
has microbatch r * n + d. A gradient is divided into shards, and each shard into one slice for each
rank that holds a copy of it. After each backward, an all-to-all sends every rank its slice of the
gradients of all the round's microbatches, which the rank adds in the order of the tree. After the
last round, the ranks that hold copies of a shard all-gather their slices of the sum.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lockstep.comm.world import World
from lockstep.tree import Counter


class RoundSum:
    """The sum of some parameters' gradients over a step's microbatches and over ranks. All these
    ranks make the same calls."""

    def __init__(self, world: World, replicas: World, label: str = "") -> None:
        """`world`: the ranks over which the gradients are summed. `replicas`: the ranks among them
        that hold the same shard. `label`: the parameters' name in errors."""
        self._world = world
        self._replicas = replicas
        memory = world.shared_memory
        self._label = memory.label(label) if memory is not None else 0

    def begin(self, count: int) -> None:
        """Begin a step of `count` microbatches over all ranks."""
        self._remaining = count
        self._counter: Counter[Tensor] = Counter(Tensor.add_, start=0, count=count)
        self._leaves: Tensor | None = None

    def add(self, given: Tensor) -> None:
        """Exchange the gradients that this rank has computed in the round: shape (microbatches,
        shards, elements of a shard). There is one microbatch, or, for experts, one for each rank
        whose tokens they compute. The gradients of several calls in a round are added."""
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
        """True if `add` has not been called in this round."""
        return self._leaves is None

    def end_round(self) -> None:
        """Add the round's gradients to the sum, in the order of microbatches. The dummy
        microbatches of a last round come last, and their gradients are dropped."""
        assert self._leaves is not None, "add comes first"
        for leaf in self._leaves[: max(0, self._remaining)]:
            self._counter.push(leaf)
        self._remaining -= len(self._leaves)
        self._leaves = None

    def finish(self) -> Tensor:
        """Return this rank's shard of the step's sum. Called after the last round."""
        (root,) = self._counter.values
        return self._replicas.gather_rows(root, [len(root)] * self._replicas.size)[: self._numbers]
