"""Gradient reduction in one exchange after the last backward of the step. The reduction supports
DTensors, which DDP does not. Over shared memory, the reduction after the backward is faster than
DDP. The CPUs do the exchange, which cannot overlap with the backward, and DDP copies every gradient
into buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lockstep.assignment import MicrobatchAssignment
from lockstep.comm.mesh import Mesh, to_local
from lockstep.comm.world import World
from lockstep.training.reducers.agreement import StepAgreement
from lockstep.training.reducers.dummies import dummy_backward
from lockstep.training.reducers.step_stats import (
    Number,
    StepStats,
    StepStatsVector,
    UnusedParameters,
    gradient_versions,
)


class PostBackwardReducer:
    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        *,
        max_microbatches: int,
        complete: Callable[[Sequence[nn.Parameter]], None] | None = None,
        agreement: StepAgreement,
    ) -> None:
        self._parameters = list(parameters)
        self._rank = mesh.data.rank
        self._numbers = mesh.summed()
        """Ranks over which a step's losses, weights and flags are summed."""
        self._groups: dict[World, list[nn.Parameter]] = {self._numbers: []}
        for parameter in self._parameters:
            self._groups.setdefault(mesh.summed(parameter), []).append(parameter)
        self._expert_places = [
            place for place, each in enumerate(self._parameters) if mesh.is_expert(each)
        ]
        self._complete = complete
        self._unused = UnusedParameters(self._parameters, self._numbers)
        self._vector = StepStatsVector(parameters, max_microbatches, mesh.world.device, agreement)

    def begin_step(self, count: int, assignment: MicrobatchAssignment) -> None:
        self._count = count
        self._mine = assignment.indices(count, self._rank)
        for parameter in self._parameters:
            parameter.grad = None

    def backward(
        self, total: Tensor, grad_output: Tensor, *, own_parameters_only: bool, is_dummy: bool
    ) -> None:
        if is_dummy:
            gradients = dummy_backward(
                total, grad_output, self._parameters, own_parameters_only=own_parameters_only
            )
            # gradients of experts count even in a dummy: they come from the tokens of other ranks
            for place in self._expert_places:
                parameter, gradient = self._parameters[place], gradients[place]
                if gradient is not None:
                    before = parameter.grad
                    parameter.grad = gradient if before is None else before + gradient
        else:
            torch.autograd.backward(
                total, grad_output, inputs=self._parameters if own_parameters_only else None
            )

    def reduce(
        self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool
    ) -> StepStats:
        if self._complete is not None:
            self._complete(self._parameters)
        used = [float(parameter.grad is not None) for parameter in self._parameters]
        packed = self._vector.pack(used, self._mine, values, weights, flag)
        for world, parameters in self._groups.items():
            if world.size > 1:
                for parameter in parameters:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                summed = [to_local(p.grad) for p in parameters if p.grad is not None]
                world.sum_each([*summed, packed] if world is self._numbers else summed)
        stats = self._vector.unpack(packed, self._count, weighted=weights is not None)
        if self._numbers.size > 1:
            self._unused.clear(used, stats)
        return stats

    def gradient_versions(self) -> list[tuple[int, int] | None]:
        return gradient_versions(self._parameters)

    def close(self) -> None: ...
