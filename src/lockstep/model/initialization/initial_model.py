from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.torch_private import (
    FakeTensor,
    disable_current_modes,
    own_buffers,
    own_parameters,
)
from lockstep.comm.mesh import Mesh
from lockstep.model.consistency import check_structure, checksums_of, tensor_checksum
from lockstep.model.initialization.deferred_init import DeferredModel, build
from lockstep.model.initialization.recorder import CannotDefer


@dataclass(slots=True)
class InitialModel:
    """A model that the user's factory has made. If the plan shards or splits the model, the initial
    values are computed later, and only for the tensors that this rank holds."""

    module: Any
    deferred: DeferredModel | None
    reason: str | None
    """The reason why the model could not be deferred."""

    checksums: dict[str, int] = field(default_factory=dict)
    """Checksums of the initial values that this rank has computed."""
    given: frozenset[str] = frozenset()
    """Names of the tensors whose values are loaded later, for example from a checkpoint."""

    @classmethod
    def build(
        cls, factory: Callable[[], Any], key: int, mesh: Mesh, *, without_values: bool = False
    ) -> InitialModel:
        """Every rank must call this method. All ranks raise an error if the models of two ranks
        differ in structure."""
        deferred, reason = None, None
        if mesh.torch_mesh is not None or without_values:
            try:
                with disable_current_modes():
                    deferred = DeferredModel.build(factory, key)
            except CannotDefer as error:
                reason = str(error)
            reason = next(filter(None, mesh.world.gather_values(reason)), None)
            # if one rank cannot defer, no rank does
            deferred = deferred if reason is None else None
        initial = cls(
            build(factory, key) if deferred is None else deferred.module, deferred, reason
        )
        check_structure(initial.module, mesh.world)
        if without_values:
            initial.given = frozenset() if deferred is None else frozenset(deferred.names.values())
        elif deferred is None and mesh.world.size > 1:
            initial.checksums = checksums_of(initial.module)
        return initial

    def materialize(self, part: nn.Module, device: torch.device) -> None:
        """Give the meta tensors of `part`, a module of the model, their initial values."""
        if self.deferred is None:
            return
        values = {
            id(tensor): self._value(tensor, self.deferred, device)
            for tensor in (*part.parameters(), *part.buffers())
            if tensor.is_meta
        }
        for module in self.module.modules():
            tensors: tuple[dict[str, Any], ...] = own_parameters(module), own_buffers(module)
            for named in tensors:
                for name, tensor in named.items():
                    named[name] = values.get(id(tensor), tensor)

    def compute_checksums(self, parts: Iterable[str]) -> None:
        """Compute checksums of modules that other ranks hold."""
        if self.deferred is not None:
            for part in parts:
                module = self.module.get_submodule(part)
                for tensor in (*module.parameters(), *module.buffers()):
                    if (name := self.deferred.names[id(tensor)]) not in self.given:
                        self.checksums[name] = tensor_checksum(self.deferred.materialize(tensor))

    def _value(self, tensor: Tensor, deferred: DeferredModel, device: torch.device) -> Tensor:
        if (name := deferred.names[id(tensor)]) in self.given:
            shape, stride = tensor.shape, tensor.stride()
            value = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)
        else:
            value = deferred.materialize(tensor)
            self.checksums[name] = tensor_checksum(value)
            value = value.to(device)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, tensor.requires_grad)
        if not isinstance(value, FakeTensor):
            value.__class__ = tensor.__class__
        value.__dict__.update(tensor.__dict__)
        return value
