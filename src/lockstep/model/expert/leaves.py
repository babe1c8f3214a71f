"""Keeps the gradients of experts apart for the rows of each rank: these are the leaves of bitwise
sums.

All rows from one rank belong to one microbatch. Each rank's rows are computed with tensors of their
own, which share memory with the parameters, so that autograd keeps the ranks' gradients apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

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
        self.ranks = ranks
        self._tensors: dict[Key, list[nn.Parameter]] = {}

    def parameters_of(self, rank: int) -> Parameters:
        """Return the tensors for the rows of rank `rank` of the axis."""
        return {key: self.of(key)[rank] for key, _ in divided_parameters(self._module)}

    def within(self, modules: Collection[nn.Module]) -> list[nn.Parameter]:
        """Return the tensors of the last forward if `modules` contains the module of experts, else
        none."""
        if self._module not in modules:
            return []
        return [each for tensors in self._tensors.values() for each in tensors]

    def key_of(self, parameter: Tensor) -> Key | None:
        """Return a parameter's key; None for a parameter of another module."""
        pairs = divided_parameters(self._module)
        return next((key for key, each in pairs if each is parameter), None)

    def of(self, key: Key) -> list[nn.Parameter]:
        """Return a parameter's tensor for each rank. Under FSDP2, only while the parameter is
        gathered."""
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
        """Return a parameter's gradient for the rows of each rank (None where a rank has none), and
        clear these gradients."""
        tensors = self._tensors.get(key)
        return [None] * self.ranks if tensors is None else list(map(_take, tensors))


class ParameterLeaves:
    """The tensors that get the gradients of one parameter in a round: the parameter (under FSDP2
    the gathered one, while it is gathered), or one tensor for the rows of each rank."""

    def __init__(
        self, parameter: nn.Parameter, leaves: Sequence[Leaves], key: Key | None = None
    ) -> None:
        """`leaves`: the leaves of all modules of experts in the model. `key`: the parameter's key,
        if tensors in `leaves` get its gradient."""
        self._parameter = parameter
        self._key = key
        keys = ((each, each.key_of(parameter)) for each in leaves)
        self._place = next(((each, key) for each, key in keys if key is not None), None)

    @property
    def are_apart(self) -> bool:
        """True if each rank's rows have their own gradient, False if all rows have one together."""
        return self._place is not None

    @property
    def count(self) -> int:
        """The number of the tensors."""
        return 1 if self._place is None else self._place[0].ranks

    def tensors(self) -> list[Tensor]:
        """Return the tensors."""
        if self._place is None:
            return [self._current]
        leaves, key = self._place
        return [*leaves.of(key)]

    def take(self) -> list[Tensor | None]:
        """Return the gradient of each tensor (None if it has none), and clear these gradients."""
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
    """Return the leaves of each parameter, by parameter (under FSDP2, by the sharded one). Under
    FSDP2, call it while parameters are sharded."""
    by_parameter: dict[nn.Parameter, ParameterLeaves] = {}
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not None and parameter not in by_parameter:
                by_parameter[parameter] = ParameterLeaves(parameter, leaves, (module, name))
    return by_parameter


def _take(tensor: Tensor) -> Tensor | None:
    gradient, tensor.grad = tensor.grad, None
    return gradient
