"""Gradients that are summed once, after the last backward: of what a rank holds of a model under `tensor` and `pipeline`, without shards,
alone or under `replicate`; and of whole replicas that share memory.

DistributedDataParallel takes no distributed tensors, and no schedule of many backwards. The bytes are the same as DDP's, but not sent while
the backward still computes. Where memory is shared it is the processors that exchange, so that nothing could go on beside it; and what DDP
does besides, a copy of every gradient into its buckets above all, took longer than the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.comm.mesh import Mesh, to_local
from lockstep.model.tensor.apply import reduce_partial_gradients
from lockstep.train.reducers.step_stats import Number, Slots, Told, forget_unused


class Parts:
    """An `Engine` for a model of which every rank of `data` holds the same part."""

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

    def backward(self, total: Tensor, seed: Tensor, *, only_these: bool, is_dummy: bool) -> None:
        if is_dummy:
            torch.autograd.grad(total, self._parameters, seed, allow_unused=True)
        else:
            torch.autograd.backward(total, seed, inputs=self._parameters if only_these else None)

    def finish(self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool) -> Told:
        return self.sum_up(self.used(), values, weights, flag=flag)

    def used(self) -> list[float]:
        """See `Inner.used`."""
        reduce_partial_gradients(self._parameters)
        return [float(parameter.grad is not None) for parameter in self._parameters]

    def sum_up(self, used: Sequence[float], values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool) -> Told:
        """See `Inner.sum_up`."""
        data = self._mesh.data
        share = self._mesh.assignment.indices(self._count, data.rank)
        said = self._slots.say(used, share, values, weights, flag)
        if data.size > 1:
            for parameter in self._parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            data.sum_each([*(to_local(p.grad) for p in self._parameters if p.grad is not None), said])
        told = self._slots.read(said, self._count, weighted=weights is not None)
        if data.size > 1 and not all(used):
            forget_unused(self._parameters, told)
        return told
