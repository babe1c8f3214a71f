"""Gradient reduction in the canonical order for models whose experts are on several ranks.

In round r, rank d of the n data ranks has microbatch r * n + d. After each backward, an all-to-all
sends each rank its slice of the gradients of all microbatches of the round, which it pushes into
binary counters. After the last round, ranks all-gather the slices of the sum. A rank with experts
has a gradient of them for each microbatch whose rows it has computed, and exchanges it only with
the ranks that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lockstep.assignment import MicrobatchAssignment
from lockstep.comm.mesh import Mesh, to_local
from lockstep.comm.world import World
from lockstep.model.expert.leaves import Leaves
from lockstep.training.reducers.step_stats import (
    Number,
    StepStats,
    StepStatsVector,
    UnusedParameters,
    gradient_versions,
)
from lockstep.tree import Counter


class RoundsReducer:
    """A `GradientReducer` for experts on several ranks, with bitwise numerics."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        leaves: Sequence[Leaves],
        *,
        max_microbatches: int,
    ) -> None:
        self._parameters = list(parameters)
        self._mesh = mesh
        self._leaves = leaves
        places: dict[tuple[bool, torch.dtype], list[int]] = {}
        for place, parameter in enumerate(parameters):
            places.setdefault((mesh.is_expert(parameter), parameter.dtype), []).append(place)
        self._sums = [
            _RoundSum(mesh.summed(self._parameters[several[0]]), several)
            for several in places.values()
        ]
        self._unused = UnusedParameters(self._parameters, mesh.summed())
        self._vector = StepStatsVector(parameters, max_microbatches, mesh.world.device)

    def begin_step(self, count: int, assignment: MicrobatchAssignment) -> None:
        self._count = count
        self._mine = assignment.indices(count, self._mesh.data.rank)
        self._used = [0.0] * len(self._parameters)
        for each in self._sums:
            each.begin(count)
        self._clear()

    def backward(
        self, total: Tensor, grad_output: Tensor, *, own_parameters_only: bool, is_dummy: bool
    ) -> None:
        leaves = [self._leaves_of(parameter) for parameter in self._parameters]
        every = [leaf for several in leaves for leaf in several]
        for leaf in every:
            leaf.grad = None
        torch.autograd.backward(total, grad_output, inputs=every if own_parameters_only else None)
        for place, (parameter, several) in enumerate(zip(self._parameters, leaves, strict=True)):
            counts = not is_dummy or self._mesh.is_expert(parameter)
            if counts and any(leaf.grad is not None for leaf in several):
                self._used[place] = 1.0
        for each in self._sums:
            each.push(list(zip(*(leaves[place] for place in each.places), strict=True)))
        self._clear()

    def reduce(
        self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool
    ) -> StepStats:
        for each in self._sums:
            flat = each.finish()
            held = [self._parameters[place] for place in each.places]
            parts = torch.split(flat, [to_local(parameter).numel() for parameter in held])
            for parameter, part in zip(held, parts, strict=True):
                parameter.grad = _like(parameter, part)
        packed = self._vector.pack(self._used, self._mine, values, weights, flag)
        self._mesh.summed().all_reduce(packed)
        stats = self._vector.unpack(packed, self._count, weighted=weights is not None)
        self._unused.clear(self._used, stats)
        return stats

    def gradient_versions(self) -> list[tuple[int, int] | None]:
        return gradient_versions(self._parameters)

    def close(self) -> None:
        """Nothing to do: there are no hooks on the model."""

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _leaves_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return the tensors that get the gradient of each microbatch of a round on this rank."""
        found = (each.of(parameter) for each in self._leaves)
        return next((several for several in found if several is not None), [parameter])


class _RoundSum:
    """The sum of some parameters' gradients over all microbatches, in the order of
    `lockstep.tree`."""

    def __init__(self, world: World, places: list[int]) -> None:
        """`world`: the ranks that hold the same parameters. `places`: of the parameters."""
        self.places = places
        self._world = world

    def begin(self, count: int) -> None:
        self._remaining = count
        self._counter: Counter[Tensor] = Counter(Tensor.add_, start=0, count=count)

    def push(self, leaves: list[tuple[Tensor, ...]]) -> None:
        """Add the gradients of a round. `leaves`: for each microbatch on this rank, the tensors
        that hold its gradient."""
        flat = torch.stack([torch.cat(list(map(_gradient, several))) for several in leaves])
        ranks = self._world.size
        microbatches, self._numbers = flat.shape
        width = -(-self._numbers // ranks)
        given = F.pad(flat, (0, width * ranks - self._numbers)).view(microbatches, ranks, width)
        given = given.transpose(0, 1).contiguous()
        received = given
        if ranks > 1:
            received = torch.empty_like(given)
            dist.all_to_all_single(received, given, group=self._world.group)
        for leaf in received.view(-1, width)[: max(0, self._remaining)]:
            self._counter.push(leaf)
        self._remaining -= ranks * microbatches

    def finish(self) -> Tensor:
        """Return the sum, flat."""
        (root,) = self._counter.values
        counts = [len(root)] * self._world.size
        return self._world.gather_rows(root, counts)[: self._numbers]


def _gradient(leaf: Tensor) -> Tensor:
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return to_local(gradient).reshape(-1)


def _like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """Return this rank's part of a gradient as a tensor that is distributed like the parameter."""
    shaped = part.view_as(to_local(parameter))
    if not isinstance(parameter, DTensor):
        return shaped
    return DTensor.from_local(
        shaped,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
