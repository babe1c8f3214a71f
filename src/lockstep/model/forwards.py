"""Runs forwards of a model, which is whole on this rank or split into a pipeline's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from lockstep.comm.world import World
from lockstep.model.pipeline.boundary import Arguments, Chunks, Run


class Forwards(Protocol):
    """Computes forwards outside of microbatches. Every rank of `world` makes the same calls."""

    world: World
    """The ranks that have the model's stages."""

    @property
    def has_output(self) -> bool:
        """True on the rank that has the model's output."""

    @property
    def last_stage(self) -> int:
        """The stage that computes the model's output."""

    def parts_by_stage(self) -> Mapping[int, Sequence[nn.Module]]:
        """Return the modules that each of this rank's stages calls. A whole model is stage 0."""

    def try_forward(self, arguments: Arguments | Chunks, run: Run) -> Any:
        """Return the model's output, or None on ranks without it. An error is raised on all
        ranks."""


class WholeModel:
    """The forwards of a model that is whole on this rank."""

    has_output = True
    last_stage = 0

    def __init__(self, model: nn.Module, world: World) -> None:
        """`world`: any world that contains this rank."""
        self.world = replace(world, rank=0, size=1, group=None, owns_group=False)
        self._model = model

    def parts_by_stage(self) -> Mapping[int, Sequence[nn.Module]]:
        return {0: [self._model]}

    def try_forward(self, arguments: Arguments | Chunks, run: Run) -> Any:
        return run(0, lambda given: given.call(self._model), arguments)
