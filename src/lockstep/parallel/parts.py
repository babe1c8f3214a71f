"""The gradients of a model that the `tensor` axis has cut and that is not sharded: alone, or under `replicate`.

DistributedDataParallel does not take distributed tensors. So gradients are summed once, after the last backward, in one exchange for each
type of number: the same bytes as DDP's, but not sent while the backward still computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.mesh import Mesh, held
from lockstep.parallel.slots import Number, Slots, Told, forget_unused
from lockstep.parallel.tensor import settle


class Parts:
    """An `Engine` for a model that `tensor_parallel` has cut."""

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: Mesh, *, max_microbatches: int) -> None:
        self._parameters = list(parameters)
        self._mesh = mesh
        dtype = torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32
        self._slots = Slots(len(parameters), max_microbatches, dtype=dtype, device=mesh.world.device)

    def close(self) -> None:
        """See `Engine.close`. There are no hooks."""

    def begin(self, count: int) -> None:
        self._count = count
        for parameter in self._parameters:
            parameter.grad = None

    def backward(self, total: Tensor, seed: Tensor, *, only_these: bool, counts: bool = True) -> None:
        """See `Engine.backward`. All microbatches count: a rank without one sends zeros."""
        assert counts
        torch.autograd.backward(total, seed, inputs=self._parameters if only_these else None)

    def finish(self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool) -> Told:
        data = self._mesh.data
        settle(self._parameters)
        share = self._mesh.deal.share(self._count, data.rank)
        used = [float(parameter.grad is not None) for parameter in self._parameters]
        said = self._slots.say(used, share, values, weights, flag)
        if data.size > 1:
            dist.all_reduce(said, group=data.group)
        told = self._slots.read(said, self._count, weighted=weights is not None)
        if data.size > 1:
            self._sum()
            forget_unused(self._parameters, told)
        return told

    def _sum(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for gradients in _alike([held(p.grad) for p in self._parameters if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=self._mesh.data.group)
            summed = torch.split(flat, [gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view(gradient.shape) for part, gradient in zip(summed, gradients, strict=True)])


def _alike(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Those of one type of number together."""
    for _, group in groupby(sorted(tensors, key=lambda tensor: str(tensor.dtype)), key=lambda tensor: tensor.dtype):
        yield list(group)
