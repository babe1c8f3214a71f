"""Gradient reduction for numerics=bitwise, after the last backward of the step. Used for pipeline
stages and models with tensor parallelism, which DDP cannot wrap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.assignment import MicrobatchAssignment
from lockstep.comm.mesh import Mesh, like_parameter, to_local
from lockstep.comm.ordered_sum import OrderedSum, TreeNodes
from lockstep.comm.world import World
from lockstep.training.reducers.agreement import StepAgreement
from lockstep.training.reducers.dummies import dummy_backward
from lockstep.training.reducers.microbatch_checksums import MicrobatchChecksums, Recording
from lockstep.training.reducers.step_stats import (
    Number,
    StepStats,
    StepStatsVector,
    UnusedParameters,
    gradient_versions,
)
from lockstep.tree import Counter

BUCKET_BYTES = 32 << 20


class OrderedReducer:
    """Sums gradients for numerics=bitwise if all data-parallel ranks hold the same part of the
    model."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        *,
        max_microbatches: int,
        stages: Sequence[Sequence[nn.Parameter]] | None = None,
        agreement: StepAgreement,
    ) -> None:
        self._parameters = list(parameters)
        self._world = mesh.summed()
        self._rank = mesh.data.rank
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._stages = [
            _StageSum(stage, self._world, [places[id(parameter)] for parameter in stage])
            for stage in ([parameters] if stages is None else stages)
        ]
        self.recording = Recording()
        self._discards = False
        self._unused = UnusedParameters(self._parameters, self._world)
        self._vector = StepStatsVector(parameters, max_microbatches, mesh.world.device, agreement)

    def begin_step(self, count: int, assignment: MicrobatchAssignment) -> None:
        self._count = count
        self._mine = assignment.indices(count, self._rank)
        nodes = TreeNodes.of(assignment.indices_by_rank(count))
        for parameter in self._parameters:
            parameter.grad = None
        for stage in self._stages:
            stage.begin(self._mine, nodes)

    def backward(
        self, total: Tensor, grad_output: Tensor, *, own_parameters_only: bool, is_dummy: bool
    ) -> None:
        if is_dummy:
            dummy_backward(
                total, grad_output, self._parameters, own_parameters_only=own_parameters_only
            )
            return
        torch.autograd.backward(
            total, grad_output, inputs=self._parameters if own_parameters_only else None
        )
        self._stages[0].push(self._stages[0].take_leaf(self.recording.at()))

    def after_backward(self, stage: int, microbatch: int) -> None:
        """Take the gradient that a pipeline schedule has computed."""
        of_stage = self._stages[stage]
        leaf = of_stage.take_leaf(self.recording.at(microbatch))
        if self._discards:
            return
        if microbatch != of_stage.taken:
            raise AssertionError(
                f"the backward of microbatch {microbatch} came after {of_stage.taken}"
                " others; gradients are leaves of the tree in the order of microbatches"
            )
        of_stage.push(leaf)

    @contextmanager
    def discarding(self) -> Iterator[None]:
        for parameter in self._parameters:
            parameter.grad = None  # after `reduce`, it was the sum
        self._discards = True
        try:
            yield
        finally:
            self._discards = False

    def recompute(self, total: Tensor, grad_output: Tensor) -> None:
        torch.autograd.backward(total, grad_output)
        self._stages[0].take_leaf(self.recording.at())

    def reduce(
        self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool
    ) -> StepStats:
        used = {id(each) for stage in self._stages for each in stage.finish()}
        mine = [float(id(parameter) in used) for parameter in self._parameters]
        packed = self._vector.pack(mine, self._mine, values, weights, flag)
        self._world.all_reduce(packed)
        stats = self._vector.unpack(packed, self._count, weighted=weights is not None)
        self._unused.clear(mine, stats)
        return stats

    def gradient_versions(self) -> list[tuple[int, int] | None]:
        return gradient_versions(self._parameters)

    def close(self) -> None: ...


class _StageSum:
    """Sums over microbatches the gradients of one pipeline stage, or of the whole model."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: World, places: Sequence[int]
    ) -> None:
        self._parameters = list(parameters)
        self._places = places
        self._buckets = list(_buckets(self._parameters))
        self._world = world

    def begin(self, mine: range, nodes: TreeNodes) -> None:
        self.taken = 0
        self._count = len(mine)
        self._nodes = nodes
        self._used: set[int] = set()
        self._counter: Counter[list[Tensor]] = Counter(_add, start=mine.start, count=nodes.count)

    def take_leaf(self, checksums: MicrobatchChecksums | None) -> list[Tensor | None]:
        leaf = [_taken(parameter) for parameter in self._parameters]
        if checksums is not None:
            for place, gradient in zip(self._places, leaf, strict=True):
                if gradient is not None:
                    checksums.add(place, gradient)
        return leaf

    def push(self, leaf: Sequence[Tensor | None]) -> None:
        self._used |= {place for place, gradient in enumerate(leaf) if gradient is not None}
        pairs = zip(self._parameters, leaf, strict=True)
        self._counter.push(
            [
                torch.zeros_like(to_local(parameter.detach())) if gradient is None else gradient
                for parameter, gradient in pairs
            ]
        )
        self.taken += 1

    def finish(self) -> list[nn.Parameter]:
        """Return the parameters that this rank's microbatches have used. Every rank must call this
        method."""
        if self.taken != self._count:
            raise AssertionError(f"{self.taken} of {self._count} microbatches had a backward")
        for parameter, total in zip(self._parameters, self._total(), strict=True):
            parameter.grad = like_parameter(parameter, total)
        return [self._parameters[place] for place in sorted(self._used)]

    def _total(self) -> list[Tensor]:
        if self._world.size == 1:
            (root,) = self._counter.values
            return root
        local = [to_local(parameter.detach()) for parameter in self._parameters]
        totals: list[Tensor] = [torch.empty(0)] * len(local)
        for places in self._buckets:
            flat = [
                torch.cat([value[place].reshape(-1) for place in places])
                for value in self._counter.values
            ]
            ordered = OrderedSum(flat, self._nodes, self._world)
            ordered.start(sum(local[place].numel() for place in places), local[places[0]])
            ordered.fold()
            parts = torch.split(ordered.finish(), [local[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                totals[place] = part.view(local[place].shape)
        return totals


def _taken(parameter: nn.Parameter) -> Tensor | None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return None
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return to_local(gradient)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """Yield the indices of each bucket's parameters. All parameters of a bucket have one dtype."""
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
