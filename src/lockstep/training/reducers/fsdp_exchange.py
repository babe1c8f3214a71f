"""Replacements for FSDP2's collectives: reduce-scatters that sum (plainly, or in tree order), and an all-gather in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.torch_private import AllGather, ReduceScatter
from lockstep.comm.mesh import Mesh, to_local
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.tree import Counter

# Its name from torch 2.13 on; the old one warns there.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gather(AllGather):
    """The all-gather of a block's parameters through the memory that the ranks of `shard` share."""

    def __init__(self, memory: SharedMemoryGroup) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
        if async_op:
            return self._memory.start_all_gather(output_tensor, input_tensor)
        self._memory.all_gather(output_tensor, input_tensor)
        return None


class Scatter(ReduceScatter):
    """The reduce-scatter over the `shard` axis for one of FSDP2's parameter groups. Every rank calls its methods alike.

    It may be called more than once in a round, if the forward calls the model more than once. Outside of a step (in a backward of another
    model's loss through this one) it exchanges nothing.
    """

    def __init__(self, memory: SharedMemoryGroup | None) -> None:
        """`memory`: the shared memory of the ranks of `shard`, if they have one."""
        self._memory = memory
        self._in_step = False

    def begin(self, count: int) -> None:
        """Begin a step of `count` microbatches."""
        self._in_step = True

    def next_round(self, *, is_dummy: bool) -> None:
        """Begin the next round of backwards. `is_dummy`: its gradient is discarded."""
        self._is_dummy = is_dummy

    def end_round(self, *, last: bool) -> None:
        """End the round. After the `last` one, the gradients of FSDP2's parameters hold the sum."""

    def end(self) -> None:
        """End the step."""
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
    replicas exchange their slices of the sum. FSDP2 itself receives zeros, which the sum replaces at the end (on the CPU, if FSDP2
    has offloaded them).
    """

    def __init__(self, mesh: Mesh, parameters: Any) -> None:
        """`parameters`: FSDP2's parameter group, which defines the order and padding of the gradients; None if it has no parameters."""
        super().__init__(mesh.data.shared_memory)
        self._parameters = parameters
        self._data = mesh.data
        self._replicas = mesh.axis("replicate")
        self._shards = mesh.axis("shard").size

    def begin(self, count: int) -> None:
        super().begin(count)
        self._left = count
        self._counter: Counter[Tensor] = Counter(Tensor.add_, start=0, count=count)

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
