"""Gradient reduction for numerics=bitwise, for models whose backward computes gradients of full
parameters. Used for models with experts on several ranks, and for sharded models that compute a
sequence in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from lockstep.assignment import MicrobatchAssignment
from lockstep.comm.mesh import Mesh, like_parameter, to_local
from lockstep.model.expert.leaves import Leaves, ParameterLeaves, leaves_of
from lockstep.model.separate_parts import PartLeaf
from lockstep.model.shard import reshard
from lockstep.training.reducers.agreement import StepAgreement
from lockstep.training.reducers.microbatch_checksums import Recording
from lockstep.training.reducers.round_sum import RoundSum
from lockstep.training.reducers.step_stats import (
    Number,
    StepStats,
    StepStatsVector,
    UnusedParameters,
    gradient_versions,
)


class RoundsReducer:
    """Exchanges gradients after each round of microbatches. A round has one microbatch on each
    rank."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        leaves: Sequence[Leaves],
        part_leaves: Sequence[PartLeaf],
        *,
        max_microbatches: int,
        stages: Sequence[Sequence[nn.Parameter]] | None = None,
        agreement: StepAgreement,
    ) -> None:
        self._parameters = list(parameters)
        self._mesh = mesh
        self._model = model
        self._is_in_stages = stages is not None
        reshard(model)
        by_parameter = leaves_of(model, leaves)
        of_parts = {leaf.parameter: leaf for leaf in part_leaves}
        self._leaves: list[ParameterLeaves | PartLeaf] = [
            of_parts.get(parameter)
            or by_parameter.get(parameter)
            or ParameterLeaves(parameter, leaves)
            for parameter in self._parameters
        ]
        place_of = {parameter: place for place, parameter in enumerate(self._parameters)}
        self._stages = [
            self._sums_of([place_of[each] for each in stage])
            for stage in ([self._parameters] if stages is None else stages)
        ]
        self._rounds = [0] * len(self._stages)
        self.recording = Recording()
        self._discards = False
        self._unused = UnusedParameters(self._parameters, mesh.summed())
        self._vector = StepStatsVector(parameters, max_microbatches, mesh.world.device, agreement)

    def begin_step(self, count: int, assignment: MicrobatchAssignment) -> None:
        self._count = count
        self._mine = assignment.indices(count, self._mesh.data.rank)
        self._used = [0.0] * len(self._parameters)
        self._rounds = [0] * len(self._stages)
        for each, _ in chain(*self._stages):
            each.begin(count)
        self._clear()

    def backward(
        self, total: Tensor, grad_output: Tensor, *, own_parameters_only: bool, is_dummy: bool
    ) -> None:
        inputs = None
        if own_parameters_only:
            inputs = [leaf for several in self._leaves for leaf in several.tensors()]
        self._clear()  # another model's loss may have left gradients
        torch.autograd.backward(total, grad_output, inputs=inputs)
        self._end_round(0, self._take(0, None), is_dummy=is_dummy)

    def after_backward(self, stage: int, microbatch: int) -> None:
        """Take the gradient that a pipeline schedule has computed."""
        taken = self._take(stage, microbatch)
        if self._discards:
            return
        assert microbatch == self._rounds[stage], "gradients are leaves of the tree in this order"
        self._end_round(stage, taken, is_dummy=microbatch >= len(self._mine))

    @contextmanager
    def discarding(self) -> Iterator[None]:
        self._discards = True
        try:
            yield
        finally:
            self._discards = False
            reshard(self._model)

    def recompute(self, total: Tensor, grad_output: Tensor) -> None:
        self._clear()
        torch.autograd.backward(total, grad_output)
        self._take(0, None)

    def _take(self, stage: int, microbatch: int | None) -> dict[int, list[Tensor | None]]:
        """Take the gradients of a stage's parameters, by parameter index. An expert has a list of
        gradients, one for the tokens of each rank."""
        checksums = self.recording.at(microbatch)
        taken: dict[int, list[Tensor | None]] = {}
        for place in (place for _, places in self._stages[stage] for place in places):
            taken[place] = self._leaves[place].take()
            if checksums is not None:
                for gradient in taken[place]:
                    if gradient is not None:
                        checksums.add(place, to_local(gradient))
        if not self._is_in_stages:
            reshard(self._model)
        return taken

    def _end_round(
        self, stage: int, taken: dict[int, list[Tensor | None]], *, is_dummy: bool
    ) -> None:
        self._rounds[stage] += 1
        for place, gradients in taken.items():
            counts = not is_dummy or self._mesh.is_expert(self._parameters[place])
            if counts and any(gradient is not None for gradient in gradients):
                self._used[place] = 1.0
        for summed, places in self._stages[stage]:
            shaped = [
                [self._in_shards(gradient, self._parameters[place]) for gradient in taken[place]]
                for place in places
            ]
            summed.add(torch.stack([torch.cat(leaf, 1) for leaf in zip(*shaped, strict=True)]))
            summed.end_round()

    def reduce(
        self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool
    ) -> StepStats:
        reshard(self._model)  # stages are gathered for all microbatches of the step
        for summed, places in chain(*self._stages):
            held = [self._parameters[place] for place in places]
            parts = torch.split(summed.finish(), [self._shards(each)[1] for each in held])
            for parameter, part in zip(held, parts, strict=True):
                held_here = to_local(parameter)
                own = part[: held_here.numel()].to(held_here.device)
                parameter.grad = like_parameter(parameter, own)
        packed = self._vector.pack(self._used, self._mine, values, weights, flag)
        self._mesh.summed().all_reduce(packed)
        stats = self._vector.unpack(packed, self._count, weighted=weights is not None)
        self._unused.clear(self._used, stats)
        return stats

    def gradient_versions(self) -> list[tuple[int, int] | None]:
        return gradient_versions(self._parameters)

    def close(self) -> None: ...

    def _sums_of(self, places: Sequence[int]) -> list[tuple[RoundSum, list[int]]]:
        kinds: dict[tuple[bool, torch.dtype], list[int]] = {}
        for place in places:
            parameter = self._parameters[place]
            kind = self._mesh.is_expert(parameter), parameter.dtype
            kinds.setdefault(kind, []).append(place)
        sums = []
        for several in kinds.values():
            first = self._parameters[several[0]]
            world, shards = self._mesh.summed(first), self._mesh.shards(first)
            replicas = world if shards.size == 1 else self._mesh.replicas
            sums.append((RoundSum(world, replicas), several))
        return sums

    def _clear(self) -> None:
        for each in self._leaves:
            each.take()

    def _shards(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return the number of shards, and the number of elements of a padded shard."""
        shards = self._mesh.shards(parameter).size
        if shards == 1:
            return 1, to_local(parameter).numel()
        rows, *others = parameter.shape
        if self._mesh.is_expert(parameter):
            rows //= self._mesh.axis("expert").size
        return shards, -(-rows // shards) * math.prod(others)

    def _in_shards(self, gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
        """Return shape (shards, elements of a padded shard). A gradient of None becomes zeros."""
        shards, numbers = self._shards(parameter)
        dtype, device = parameter.dtype, self._mesh.world.device
        padded = torch.zeros(shards, numbers, dtype=dtype, device=device)
        if gradient is not None:
            flat = to_local(gradient).reshape(-1)
            padded.view(-1)[: len(flat)] = flat
        if shards == 1:
            return padded
        chunks = self._mesh.tokens
        return padded.view(-1, chunks.size, numbers)[:, chunks.rank]
