"""The state of a run that a process holds while it waits for its new rank, after the loss of
another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.manifest import Manifest
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World
from lockstep.training.state import state_of
from lockstep.training.training import Training


@dataclass(frozen=True, slots=True)
class HeldState:
    """The full state of a replica after a step: the tensors of the modules that trained until then,
    not copied."""

    step: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    """JSON, such as a checkpoint's manifest has."""

    @classmethod
    def of(cls, training: Training) -> HeldState:
        """The state of this process; it must be that of a complete step."""
        state = state_of(training.modules, training.stateful)
        return cls(training.run.step, state.tensors, values_to_hold(training, state.values))


def values_to_hold(training: Training, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is held in memory beside tensors, with the recipe by which it was trained.
    `values`: of the state."""
    learned = {"recipe": training.context.recorder.summary.get("recipe"), "code": training.code}
    return {**values, **training.loop.values(), **learned, "step": training.run.step}


class ReplicaReader:
    """Reads the state that some of the ranks hold, as `CheckpointReader` reads a checkpoint. The
    newest one counts."""

    def __init__(self, held: HeldState | None, world: World) -> None:
        """Every rank makes one, with the state that it holds."""
        steps = world.gather_values(-1 if held is None else held.step)
        newest = max(steps)
        self._source = steps.index(newest)
        self._held = held if held is not None and held.step == newest else None
        self._is_held_by_all = min(steps) == newest
        described = None
        if self._held is not None and world.rank == self._source:
            kinds = {
                name: [str(t.dtype).removeprefix("torch."), list(t.shape)]
                for name, t in self._held.tensors.items()
            }
            described = [kinds, dict(self._held.values)]
        kinds, values = world.value_of(self._source, described) or ({}, {})
        self.manifest = Manifest(step=newest, files={}, values=values, metadata={})
        """Its step is -1 if no rank holds a state."""
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (dtype, tuple(shape)) for name, (dtype, shape) in kinds.items()
        }
        """Name -> dtype and shape of each tensor."""

    @torch.no_grad()
    def load_into(self, state: Mapping[str, Tensor], world: World) -> None:
        """Load the values into this rank's tensors. Every rank calls it, with the same names."""
        for name, target in state.items():
            local = to_local(target).detach()
            if self._held is not None:
                local.copy_(to_local(self._held.tensors[name]))
            if not self._is_held_by_all:
                sent = local.contiguous()
                flat = torch.view_as_real(sent) if sent.is_complex() else sent
                world.broadcast(flat.reshape(-1).view(torch.uint8), self._source)
                if sent is not local:
                    local.copy_(sent)
