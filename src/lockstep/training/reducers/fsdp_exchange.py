"""FSDP2's exchanges, replaced: the reduce-scatter by a plain sum, or the canonical tree's; the all-gather by one through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.torch_private import AllGather, ReduceScatter
from lockstep.comm.mesh import Mesh, to_local
from lockstep.comm.ordered_sum import add
from lockstep.comm.shared_memory import SharedGroup
from lockstep.tree import Counter

# Its name from torch 2.13 on; the old one warns there.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gather(AllGather):
    """The all-gather of a block's parameters through the memory that the ranks of `shard` share."""

    def __init__(self, memory: SharedGroup) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
        if async_op:
            return self._memory.start_all_gather(output_tensor, input_tensor)
        self._memory.all_gather(output_tensor, input_tensor)
        return None


class Scatter(ReduceScatter):
    """The sum over the `shard` axis. One for each of FSDP2's groups of parameters. Every rank calls its methods alike.

    A group may be called more than once in a round: the model was, in one forward. Outside of a step, as in the turn of another model
    whose loss reaches this one, nothing is exchanged.
    """

    def __init__(self, memory: SharedGroup | None) -> None:
        """`memory`: what the ranks of `shard` share, if they do."""
        self._memory = memory
        self._in_step = False

    def begin(self, count: int) -> None:
        """A step of `count` microbatches starts."""
        self._in_step = True

    def next_round(self, *, is_dummy: bool) -> None:
        """The next backward is another round's. `is_dummy`: its gradient is discarded."""
        self._is_dummy = is_dummy

    def end_round(self, *, last: bool) -> None:
        """The backward is done. After the last one the gradients of FSDP2's parameters are the sum."""

    def end(self) -> None:
        """The step is over."""
        self._in_step = False

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        if not self._in_step:
            output_tensor.zero_()
            return None
        if self._is_dummy:
            input_tensor.zero_()
        return self._sum(output_tensor, input_tensor, group, async_op)

    def _sum(self, output: Tensor, sent: Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
        if self._memory is not None:
            self._memory.reduce_scatter(output, sent)
            return None
        work: dist.Work | None = reduce_scatter_single(output, sent, group=group, op=dist.ReduceOp.SUM, async_op=async_op)
        return work


class OrderedScatter(Scatter):
    """The sum over all microbatches of a step, in the order of `lockstep.tree`, over `shard` and `replicate` at once.

    In round r, rank d of the n data ranks has microbatch r * n + d. Each shard of the gradient is cut into one slice for each of its
    replicas; an all-to-all brings every rank all leaves of its slice, which it pushes into a binary counter; after the last round
    replicas exchange their slices of the sum. FSDP2 is given zeros, which the sum then replaces, on the CPU where FSDP2 has put them
    there; gradients of earlier rounds are thrown away.
    """

    def __init__(self, mesh: Mesh, parameters: Any) -> None:
        """`parameters`: FSDP2's group of them, in whose order and padding the gradients are sent; None for a group without."""
        super().__init__(mesh.data.memory)
        self._parameters = parameters
        self._data = mesh.data
        self._replicas = mesh.axis("replicate")
        self._shards = mesh.axis("shard").size

    def begin(self, count: int) -> None:
        super().begin(count)
        self._left = count
        self._counter: Counter[Tensor] = Counter(add, start=0, count=count)

    def next_round(self, *, is_dummy: bool) -> None:
        super().next_round(is_dummy=is_dummy)
        self._leaves: Tensor | None = None

    def _sum(self, output: Tensor, sent: Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
        width = output.numel()
        each = -(-width // self._replicas.size)
        outgoing = sent.new_zeros(self._replicas.size, self._shards, each)
        shards = sent.view(self._shards, width)
        for replica in range(self._replicas.size):
            part = shards[:, replica * each : (replica + 1) * each]
            outgoing[replica, :, : part.shape[1]] = part
        leaves = torch.empty_like(outgoing).view(self._data.size, each)
        if self._memory is not None:
            sizes = [each] * self._data.size
            self._memory.all_to_all(leaves.view(-1), outgoing.view(-1), sizes, sizes)
        else:
            dist.all_to_all_single(leaves.view(-1), outgoing.view(-1), group=self._data.group)
        output.zero_()
        if self._leaves is None:
            self._leaves, self._width = leaves, width
        else:
            self._leaves += leaves
        return None

    def end_round(self, *, last: bool) -> None:
        if self._leaves is None:
            return  # a group without parameters
        for leaf in self._leaves[: self._left]:
            self._counter.push(leaf)
        self._left -= self._data.size
        if last:
            (root,) = self._counter.values
            if self._replicas.size > 1:
                root = self._replicas.gather_rows(root, [root.numel()] * self._replicas.size)[: self._width]
            self._hand_over(root)

    def _hand_over(self, flat: Tensor) -> None:
        """Write the sum, this rank's shards one after another, over the gradients."""
        trainable = [each for each in self._parameters.fsdp_params if each.sharded_param.requires_grad]
        gradients = [to_local(each.sharded_param.grad) for each in trainable]
        flat = flat.to(gradients[0].device)
        padded = [each.padded_sharded_param_size.numel() for each in trainable]
        for gradient, part in zip(gradients, torch.split(flat, padded), strict=True):
            gradient.copy_(part[: gradient.numel()].view_as(gradient))
