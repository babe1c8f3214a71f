"""Buffers that a module updates in its forward: the vectors of `spectral_norm`, the codes of a
vector quantizer.

They are updated once a step, from the first microbatch, so they do not depend on the number of
processes or the assignment of microbatches (law 2). Every microbatch's forward begins with the
values from before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from lockstep.assignment import MicrobatchAssignment
from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import forward_pre_hooks, own_buffers
from lockstep.comm.world import World

ATTRIBUTE = "self_updating_buffers"
"""The attribute of a module, or of its class, that names such buffers."""


def self_updating(module: nn.Module) -> Sequence[str]:
    """Return the names of the module's own buffers that its forward updates. Raises
    `RecipeError`."""
    names = list(getattr(module, ATTRIBUTE, ()))
    if type(module).__name__ == "_SpectralNorm":  # torch.nn.utils.parametrizations.spectral_norm
        # a vector needs none
        names += [name for name in ("_u", "_v") if own_buffers(module).get(name) is not None]
    for hook in forward_pre_hooks(module):
        if isinstance(hook, SpectralNorm):  # torch.nn.utils.spectral_norm
            names += [f"{hook.name}_u", f"{hook.name}_v"]
    for name in names:
        if own_buffers(module).get(name) is None:
            raise RecipeError(
                f"{type(module).__name__}.{ATTRIBUTE} names {name!r}, which is none of its "
                "buffers; name buffers that it registers"
            )
    return names


class SelfUpdatingBuffers:
    """The buffers of one module. Each call of its forward in a microbatch gets a copy, which that
    call may change."""

    def __init__(self, prefix: str, module: nn.Module, names: Sequence[str]) -> None:
        self._prefix = f"{prefix}." if prefix else ""
        self.kept: dict[str, Tensor] = {
            name: buffer for name in names if (buffer := own_buffers(module)[name]) is not None
        }
        self._first: dict[str, Tensor] | None = None
        self.discard()
        # Runs before spectral_norm's hook, which updates its buffers.
        self.hooks = [
            module.register_forward_pre_hook(self._swap_in, prepend=True),
            module.register_forward_hook(self._swap_out, always_call=True),
        ]

    def discard(self) -> None:
        """Begin the next microbatch's forward, or a recomputation, with the values from before the
        step."""
        self._taken: dict[str, Tensor] | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._first = None
        self.discard()

    def note_microbatch(self) -> None:
        """Keep the updates of this rank's first microbatch."""
        if self._first is None and self._taken is not None:
            self._first = self._taken
        self.discard()

    def reshaped(self) -> str | None:
        """Describe a buffer whose shape this rank's first microbatch has changed. None if there is
        none."""
        for name, updated in (self._first or {}).items():
            if updated.shape != self.kept[name].shape:
                return (
                    f"shape of its buffer {self._prefix + name!r} from"
                    f" {tuple(self.kept[name].shape)} to {tuple(updated.shape)}"
                )
        return None

    def commit(
        self, assignment: MicrobatchAssignment, data: World, count: int, *, apply: bool | Tensor
    ) -> None:
        """Take over the updates of the first of all `count` microbatches. Every rank calls it."""
        owner = next(
            rank for rank, indices in enumerate(assignment.indices_by_rank(count)) if 0 in indices
        )
        for name, buffer in self.kept.items():
            updated = (
                buffer.clone()
                if self._first is None
                else self._first[name].to(buffer.dtype).contiguous()
            )
            data.broadcast(updated, owner)
            if isinstance(apply, Tensor):
                updated = torch.where(apply.to(buffer.device), updated, buffer)
            if apply is not False:
                buffer.copy_(updated)
        self._first = None

    def _swap_in(self, module: nn.Module, _: Any) -> None:
        if module.training:
            if self._taken is None:
                self._taken = {name: buffer.clone() for name, buffer in self.kept.items()}
            own_buffers(module).update(self._taken)

    def _swap_out(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._taken is not None and module.training:
            self._taken = {name: own_buffers(module)[name] for name in self.kept}  # type: ignore[misc]  # the forward may replace them
        own_buffers(module).update(self.kept)
