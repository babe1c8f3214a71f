"""Forwards outside of training steps. The model is whole on this rank, or split into pipeline
stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from lockstep.comm.world import World
from lockstep.model.pipeline.boundary import Arguments, Chunks, Run


class Forwards(Protocol):
    """Computes forwards of a model that belong to no microbatch, such as a check before the first
    step. Every rank of `world` must make the same calls."""

    world: World
    """The ranks that hold the model together: the ranks of the pipeline, or this rank alone."""

    @property
    def has_output(self) -> bool: ...

    @property
    def last_stage(self) -> int: ...

    def parts_by_stage(self) -> Mapping[int, Sequence[nn.Module]]:
        """Without a pipeline, the parts of the model belong to stage 0."""

    def try_forward(self, arguments: Arguments | Chunks, run: Run) -> Any:
        """Return None on ranks that do not have the output. An error on one rank is raised on all
        ranks."""


class WholeModel:
    has_output = True
    last_stage = 0

    def __init__(self, model: nn.Module, world: World) -> None:
        """`world` may be any group that contains this rank."""
        self.world = replace(world, rank=0, size=1, group=None, owns_group=False)
        self._model = model

    def parts_by_stage(self) -> Mapping[int, Sequence[nn.Module]]:
        return {0: [self._model]}

    def try_forward(self, arguments: Arguments | Chunks, run: Run) -> Any:
        return run(0, lambda given: given.call(self._model), arguments)
