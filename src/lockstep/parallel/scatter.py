"""FSDP2's reduce-scatter, replaced: a plain sum, or the canonical tree's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from lockstep.comm.mesh import Mesh
from lockstep.comm.ordered import add, all_gather_single
from lockstep.tree import Counter

# Its name from torch 2.13 on; the old one warns there.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Scatter(ReduceScatter):
    """The sum over the `shard` axis. One for each of FSDP2's groups of parameters."""

    def begin(self, count: int) -> None:
        """A step of `count` microbatches starts. Every rank calls it."""

    def next_round(self, number: int, *, counts: bool, last: bool) -> None:
        """The next backward is round `number`'s, the `last` or not; `counts` is False where this rank computes it for nothing."""
        self._round, self._counts, self._last = number, counts, last

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        if not self._counts:
            input_tensor.zero_()
        work: dist.Work | None = reduce_scatter_single(output_tensor, input_tensor, group=group, op=dist.ReduceOp.SUM, async_op=async_op)
        return work


class OrderedScatter(Scatter):
    """The sum over all microbatches of a step, in the order of `lockstep.tree`, over `shard` and `replicate` at once.

    In round r, rank d of the n data ranks has microbatch r * n + d. Each shard of the gradient is cut into one slice for each of its
    replicas; an all-to-all brings every rank all leaves of its slice, which it pushes into a binary counter; after the last round
    replicas exchange their slices of the sum. FSDP2 is given the sum in the last round, and gradients of the others are thrown away.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._data = mesh.data
        self._replicas = mesh.axis("replicate")
        self._shards = mesh.axis("shard").size

    def begin(self, count: int) -> None:
        self._count = count
        self._counter: Counter[Tensor] = Counter(add, start=0, count=count)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        width = output_tensor.numel()
        each = -(-width // self._replicas.size)
        outgoing = input_tensor.new_zeros(self._replicas.size, self._shards, each)
        shards = input_tensor.view(self._shards, width)
        for replica in range(self._replicas.size):
            part = shards[:, replica * each : (replica + 1) * each]
            outgoing[replica, :, : part.shape[1]] = part
        leaves = torch.empty_like(outgoing).view(self._data.size, each)
        dist.all_to_all_single(leaves.view(-1), outgoing.view(-1), group=self._data.group)
        first = self._round * self._data.size
        for leaf in leaves[: self._count - first]:
            self._counter.push(leaf)
        if not self._last:
            output_tensor.zero_()
            return None
        (root,) = self._counter.values
        if self._replicas.size == 1:
            output_tensor.copy_(root)
            return None
        gathered = root.new_empty(self._replicas.size * each)
        all_gather_single(gathered, root.contiguous(), group=self._replicas.group)
        output_tensor.copy_(gathered[:width])
        return None
