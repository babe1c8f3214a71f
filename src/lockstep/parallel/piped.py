"""The gradients of a pipeline's stage, summed with those of the same stage in other pipelines (`replicate`), and of tied parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.mesh import Mesh
from lockstep.parallel.pipeline import Item, Pipeline
from lockstep.parallel.slots import Number, Slots, Told, forget_unused
from lockstep.parallel.tied import TiedGradients

BUCKET_NUMBERS = 2**22
"""Gradients are summed over pipelines in pieces of about so many numbers."""


class Piped:
    """An `Engine` whose microbatches are computed all at once: `begin`, `run`, `finish`.

    Every rank of a pipeline is given the same values and weights: `run` has told them.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], mesh: Mesh, pipeline: Pipeline, tied: TiedGradients, *, max_microbatches: int
    ) -> None:
        """`parameters`: the trainable ones of this rank's stages."""
        self._parameters = list(parameters)
        self._mesh = mesh
        self._pipeline = pipeline
        self._tied = tied
        dtype = torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32
        self._slots = Slots(len(self._parameters), max_microbatches, dtype=dtype, device=mesh.world.device)

    def begin(self, count: int) -> None:
        self._count = count
        for parameter in self._parameters:
            parameter.grad = None

    def run(self, items: Sequence[Item], columns: int) -> Tensor:
        """Forward and backward of this data rank's microbatches, see `Pipeline.run`."""
        return self._pipeline.run(items, columns)

    def backward(self, total: Tensor, seed: Tensor, *, only_these: bool, counts: bool) -> None:
        raise AssertionError("a pipeline computes a step's microbatches in `run`")

    def finish(self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool) -> Told:
        self._tied.sum()
        used = [float(parameter.grad is not None) for parameter in self._parameters]
        share = self._mesh.deal.share(self._count, self._mesh.data.rank)
        said = self._slots.say(used, share, values, weights, self._anywhere(flag))
        if self._mesh.data.size > 1:
            dist.all_reduce(said, group=self._mesh.data.group)
            for bucket in self._buckets():
                self._sum(bucket)
        told = self._slots.read(said, self._count, weighted=weights is not None)
        forget_unused(self._parameters, told)
        return told

    def close(self) -> None:
        """It has no hooks on the model."""

    def _anywhere(self, flag: bool) -> bool:
        flags = torch.tensor([float(flag)], device=self._mesh.world.device)
        dist.all_reduce(flags, group=self._pipeline.world.group)
        return bool(flags)

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        bucket: list[nn.Parameter] = []
        for place, parameter in enumerate(self._parameters):
            bucket.append(parameter)
            last = place == len(self._parameters) - 1
            if last or self._parameters[place + 1].dtype != parameter.dtype or sum(p.numel() for p in bucket) >= BUCKET_NUMBERS:
                yield bucket
                bucket = []

    def _sum(self, bucket: list[nn.Parameter]) -> None:
        for parameter in bucket:
            if parameter.grad is None:  # some other pipeline's microbatches may have used it
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=self._mesh.data.group)
        for gradient, part in zip(gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
