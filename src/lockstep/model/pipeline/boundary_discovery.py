"""Discovery of the shapes that a pipeline's stages exchange: one microbatch of each kind is
computed stage by stage. Torch's own shape inference repeats every part and the loss for each
schedule, and deadlocks if one rank fails."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import tree_leaves
from lockstep.comm.world import World
from lockstep.model.pipeline.boundary import Boundary, sendable_outputs
from lockstep.model.pipeline.failure import PipelineFailure
from lockstep.model.pipeline.microbatch import PipelineMicrobatch
from lockstep.model.pipeline.sequential_check import SequentialCheck
from lockstep.model.pipeline.stage import StageForwards, call_with, unchanged_buffers

FAILED = -1


class BoundaryDiscovery:
    """The boundaries of every kind of microbatch so far. Every rank of the pipeline makes the same
    calls on it."""

    def __init__(
        self, model: nn.Module, forwards: StageForwards, world: World, failure: PipelineFailure
    ) -> None:
        self._model = model
        self._forwards = forwards
        self._stages = forwards.stages
        self._world = world
        self._group = world.group or dist.group.WORLD
        self._failure = failure
        self._sequential_check = SequentialCheck(model, self._stages.parts)
        self._checked_modes: set[bool] = set()
        self._known: dict[tuple[int, bool], list[Boundary]] = {}
        """(hash of the inputs' shapes, backward) -> the boundary after each stage but the last."""

    def routes(
        self, microbatches: Sequence[PipelineMicrobatch], *, backward: bool
    ) -> list[list[Boundary]]:
        """Return each microbatch's boundaries after the stages but the last. Every rank calls
        it."""
        keys = [(signature, backward) for signature in self._signatures(microbatches)]
        for index in self._undiscovered(keys):
            self._known[keys[index]] = self._discover(microbatches[index], backward)
        return [self._known[key] for key in keys]

    def _undiscovered(self, keys: Sequence[tuple[int, bool]]) -> list[int]:
        """The first microbatch of each new kind; if ranks run in lockstep, of each kind that is new
        to any rank."""
        if self._forwards.lockstep_ranks is None:
            firsts = {
                key: index
                for index, key in reversed(list(enumerate(keys)))
                if key not in self._known
            }
            return sorted(firsts.values())
        new = torch.tensor([float(key not in self._known) for key in keys])
        self._forwards.lockstep_ranks.all_reduce(new)
        return [index for index, flag in enumerate(new.tolist()) if flag]

    def _signatures(self, microbatches: Sequence[PipelineMicrobatch]) -> list[int]:
        """A hash of the shapes and types of each microbatch's inputs, from the first rank. Hosts
        exchange it without waiting for their devices."""
        numbers = torch.zeros(len(microbatches), dtype=torch.int64)
        if self._world.rank == 0:
            try:
                signatures = [self._signature(microbatch) for microbatch in microbatches]
                numbers = torch.tensor(signatures, dtype=torch.int64)
            except Exception as error:
                self._failure.error = error
                numbers.fill_(FAILED)
        self._world.broadcast(numbers, 0)
        found: list[int] = numbers.tolist()
        if FAILED in found:
            self._failure.raise_known()
        return found

    def _signature(self, microbatch: PipelineMicrobatch) -> int:
        self._forwards.streams.start(microbatch.position)
        inputs = microbatch.inputs()
        if self._model.training not in self._checked_modes:
            self._sequential_check.check(lambda forward: call_with(forward, inputs))
            self._checked_modes.add(self._model.training)
        leaves = tree_leaves(inputs)
        described = [
            (list(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else type(leaf).__name__
            for leaf in leaves
        ]
        text = f"{described} {self._model.training}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())

    def _discover(self, microbatch: PipelineMicrobatch, backward: bool) -> list[Boundary]:
        """Find this microbatch's boundaries by computing its stages one after another. Every rank
        calls it."""
        route: list[Boundary] = []
        value: tuple[Tensor, ...] = ()
        for stage in range(len(self._stages.ranges) - 1):
            described = None
            if stage in self._forwards.own:
                try:
                    with (
                        self._forwards.around(self._forwards.own.index(stage)),
                        self._forwards.computing(microbatch),
                        unchanged_buffers(self._forwards.parts[stage]),
                        torch.set_grad_enabled(backward),
                    ):
                        output = self._forwards.output(stage, microbatch, value, route)
                    described = Boundary.of(output, self._stages.last_part(stage))
                    value = tuple(tensor.detach() for tensor in sendable_outputs(output))
                except Exception as error:
                    self._failure.error = error
            described = self._world.value_of(stage % self._stages.ranks, described)
            if described is None:
                self._failure.raise_known()
            route.append(Boundary.from_json(described))
            if backward and not any(route[-1].gradients):  # every stage has something to train
                raise RecipeError(
                    f"the part {self._stages.last_part(stage)!r} of the model hands on "
                    f"{route[-1].describe()}, so no gradient reaches the trainable parameters up "
                    "to it; freeze them (requires_grad_(False)), or hand on a tensor with a "
                    "gradient: no detach(), no whole numbers"
                )
            value = self._sent_to_next_stage(stage, value, route[-1])
        return route

    def _sent_to_next_stage(
        self, stage: int, value: tuple[Tensor, ...], boundary: Boundary
    ) -> tuple[Tensor, ...]:
        """Send the value, or receive it. Return the input of the next stage, if it is on this
        rank."""
        source, target = stage % self._stages.ranks, (stage + 1) % self._stages.ranks
        if source == target or self._world.rank not in (source, target):
            return value
        if self._world.rank == source:
            for tensor in value:
                dist.send(tensor, group=self._group, group_dst=target)
            return ()
        value = boundary.tensors(self._world.device)
        for tensor in value:
            dist.recv(tensor.detach(), group=self._group, group_src=source)
        return value
