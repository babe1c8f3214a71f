"""Keeps the gradients of experts apart for the rows of each rank. Bitwise numerics adds the
gradients in a fixed order. Each rank computes one microbatch at a time, so its rows belong to one
microbatch. Each rank's rows are computed with separate tensors, called leaves, which share memory
with the parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.base.torch_private import own_parameters, to_local

Key = tuple[nn.Module, str]
Parameters = Mapping[Key, Tensor]
"""The tensors with which modules compute in place of their parameters."""


def divided_parameters(module: nn.Module) -> Iterator[tuple[Key, DTensor]]:
    for each in module.modules():
        for name, parameter in own_parameters(each).items():
            if isinstance(parameter, DTensor):
                yield (each, name), parameter


class Leaves:
    """The tensors that replace one module's parameters. Each rank's rows are computed with separate
    tensors."""

    def __init__(self, module: nn.Module, ranks: int) -> None:
        self._module = module
        self.ranks = ranks
        self._tensors: dict[Key, list[nn.Parameter]] = {}

    def parameters_of(self, rank: int) -> Parameters:
        return {key: self.of(key)[rank] for key, _ in divided_parameters(self._module)}

    def within(self, modules: Collection[nn.Module]) -> list[nn.Parameter]:
        if self._module not in modules:
            return []
        return [each for tensors in self._tensors.values() for each in tensors]

    def key_of(self, parameter: Tensor) -> Key | None:
        pairs = divided_parameters(self._module)
        return next((key for key, each in pairs if each is parameter), None)

    def of(self, key: Key) -> list[nn.Parameter]:
        """Return the leaves of a parameter, one for the rows of each rank. Under FSDP2, the
        parameter must be gathered."""
        module, name = key
        parameter = own_parameters(module)[name]
        assert parameter is not None, "it was a parameter"
        held = to_local(parameter).detach()
        tensors = self._tensors.setdefault(key, [])
        if not tensors or tensors[0].data_ptr() != held.data_ptr():
            tensors[:] = [nn.Parameter(held.detach()) for _ in range(self.ranks)]
        for each in tensors:
            each.requires_grad_(parameter.requires_grad)
        return tensors

    def take(self, key: Key) -> list[Tensor | None]:
        """Return and clear a parameter's gradient for the rows of each rank."""
        tensors = self._tensors.get(key)
        return [None] * self.ranks if tensors is None else list(map(_take, tensors))


class ParameterLeaves:
    """The tensors whose `.grad` gets the gradient of one parameter in a backward. With bitwise
    numerics, the tensors are separate for the rows of each rank of the axis `expert`."""

    def __init__(
        self, parameter: nn.Parameter, leaves: Sequence[Leaves], key: Key | None = None
    ) -> None:
        self._parameter = parameter
        self._key = key
        keys = ((each, each.key_of(parameter)) for each in leaves)
        self._place = next(((each, key) for each, key in keys if key is not None), None)

    @property
    def are_apart(self) -> bool:
        return self._place is not None

    @property
    def count(self) -> int:
        return 1 if self._place is None else self._place[0].ranks

    def tensors(self) -> list[Tensor]:
        if self._place is None:
            return [self._current]
        leaves, key = self._place
        return [*leaves.of(key)]

    def take(self) -> list[Tensor | None]:
        if self._place is None:
            return [_take(self._current)]
        leaves, key = self._place
        return leaves.take(key)

    @property
    def _current(self) -> Tensor:
        if self._key is None:
            return self._parameter
        module, name = self._key
        current = own_parameters(module)[name]
        assert current is not None, "it was a parameter"
        return current


def leaves_of(model: nn.Module, leaves: Sequence[Leaves]) -> dict[nn.Parameter, ParameterLeaves]:
    """Under FSDP2, call this function while parameters are sharded."""
    by_parameter: dict[nn.Parameter, ParameterLeaves] = {}
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not None and parameter not in by_parameter:
                by_parameter[parameter] = ParameterLeaves(parameter, leaves, (module, name))
    return by_parameter


def _take(tensor: Tensor) -> Tensor | None:
    gradient, tensor.grad = tensor.grad, None
    return gradient
