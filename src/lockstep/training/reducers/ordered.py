"""Gradient reduction in the canonical order for a model whose ranks hold parts of the parameters.

Each microbatch's gradient is a leaf of the tree. After the last backward, the nodes of all data
ranks are summed, as buckets are by `DdpReducer`, which takes no DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.assignment import MicrobatchAssignment
from lockstep.comm.mesh import Mesh, to_local
from lockstep.comm.ordered_sum import OrderedSum, TreeNodes
from lockstep.training.reducers.dummies import leaves_of
from lockstep.training.reducers.step_stats import (
    Number,
    StepStats,
    StepStatsVector,
    UnusedParameters,
    gradient_versions,
)
from lockstep.tree import Counter

BUCKET_BYTES = 32 << 20
"""Parameters are summed together up to this size."""


class OrderedReducer:
    """A `GradientReducer` for a model of which every data rank has the same part, with bitwise
    numerics."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], mesh: Mesh, *, max_microbatches: int
    ) -> None:
        self._parameters = list(parameters)
        self._rank = mesh.data.rank
        self._world = mesh.summed()
        self._buckets = list(_buckets(self._parameters))
        self._unused = UnusedParameters(self._parameters, self._world)
        self._vector = StepStatsVector(parameters, max_microbatches, mesh.world.device)

    def begin_step(self, count: int, assignment: MicrobatchAssignment) -> None:
        self._count = count
        self._mine = assignment.indices(count, self._rank)
        self._nodes = TreeNodes.of(assignment.indices_by_rank(count))
        self._counter: Counter[list[Tensor]] = Counter(_add, start=self._mine.start, count=count)
        self._used = [0.0] * len(self._parameters)
        for parameter in self._parameters:
            parameter.grad = None

    def backward(
        self, total: Tensor, grad_output: Tensor, *, own_parameters_only: bool, is_dummy: bool
    ) -> None:
        if is_dummy:
            leaves: Sequence[Tensor] = self._parameters
            if not own_parameters_only:
                leaves = leaves_of(total, leaves)
            torch.autograd.grad(total, leaves, grad_output, allow_unused=True)
            return
        inputs = self._parameters if own_parameters_only else None
        torch.autograd.backward(total, grad_output, inputs=inputs)
        self._counter.push([self._take(place) for place in range(len(self._parameters))])

    def reduce(
        self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool
    ) -> StepStats:
        for places in self._buckets:
            held = [self._parameters[place] for place in places]
            for parameter, part in zip(held, self._sums(places), strict=True):
                parameter.grad = _like(parameter, part)
        packed = self._vector.pack(self._used, self._mine, values, weights, flag)
        self._world.all_reduce(packed)
        stats = self._vector.unpack(packed, self._count, weighted=weights is not None)
        self._unused.clear(self._used, stats)
        return stats

    def gradient_versions(self) -> list[tuple[int, int] | None]:
        return gradient_versions(self._parameters)

    def close(self) -> None:
        """Nothing to do: there are no hooks on the model."""

    def _take(self, place: int) -> Tensor:
        """Take this rank's part of the gradient of the last microbatch."""
        parameter = self._parameters[place]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return torch.zeros_like(to_local(parameter.detach()))
        self._used[place] = 1.0
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        return to_local(gradient)

    def _sums(self, places: Sequence[int]) -> Sequence[Tensor]:
        """Return the sums over all microbatches."""
        if self._world.size == 1:
            (root,) = self._counter.values
            return [root[place] for place in places]
        nodes = [
            torch.cat([value[place].reshape(-1) for place in places])
            for value in self._counter.values
        ]
        like = [to_local(self._parameters[place].detach()) for place in places]
        ordered = OrderedSum(nodes, self._nodes, self._world)
        ordered.start(sum(each.numel() for each in like), like[0])
        ordered.fold()
        parts = torch.split(ordered.finish(), [each.numel() for each in like])
        return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """Yield the places of parameters that are summed together."""
    kinds: dict[torch.dtype, list[int]] = {}
    for place, parameter in enumerate(parameters):
        kinds.setdefault(parameter.dtype, []).append(place)
    for several in kinds.values():
        bucket: list[int] = []
        size = 0
        for place in several:
            more = to_local(parameters[place].detach()).nbytes
            if bucket and size + more > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(place)
            size += more
        yield bucket


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left


def _like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """Return this rank's part of a gradient as a tensor that is distributed like the parameter."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
