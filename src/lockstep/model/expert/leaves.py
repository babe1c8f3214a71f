"""Gradients of experts, kept apart for the rows of each rank: the leaves of bitwise sums.

The rows of a rank are those of one microbatch. They are computed with tensors of their own, which
share memory with the parameters, so that autograd keeps their gradients apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.base.torch_private import own_parameters, to_local

Key = tuple[nn.Module, str]
"""A module, and the name of one of its own parameters."""
Parameters = Mapping[Key, Tensor]
"""The tensors with which modules compute, instead of their parameters."""


def divided_parameters(module: nn.Module) -> Iterator[tuple[Key, DTensor]]:
    """Yield the distributed parameters inside a module."""
    for each in module.modules():
        for name, parameter in own_parameters(each).items():
            if isinstance(parameter, DTensor):
                yield (each, name), parameter


class Leaves:
    """The tensors with which one module of experts computes the rows of each rank."""

    def __init__(self, module: nn.Module, ranks: int) -> None:
        self._module = module
        self._ranks = ranks
        self._tensors: dict[Key, list[Tensor]] = {}

    def parameters_of(self, rank: int) -> Parameters:
        """Return the tensors for rows of this rank of the axis."""
        return {
            key: self._of(key, parameter)[rank]
            for key, parameter in divided_parameters(self._module)
        }

    def of(self, parameter: Tensor) -> list[Tensor] | None:
        """Return the tensors of each rank for a parameter; None for one of another module."""
        for key, each in divided_parameters(self._module):
            if each is parameter:
                return self._of(key, each)
        return None

    def _of(self, key: Key, parameter: DTensor) -> list[Tensor]:
        held = to_local(parameter).detach()
        tensors = self._tensors.setdefault(key, [])
        if not tensors or tensors[0].data_ptr() != held.data_ptr():
            tensors[:] = [held.detach() for _ in range(self._ranks)]
        for each in tensors:
            each.requires_grad_(parameter.requires_grad)
        return tensors
