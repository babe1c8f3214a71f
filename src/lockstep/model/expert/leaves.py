"""Keeps the gradients of experts apart for the rows of each rank, so that bitwise numerics can add
them in a fixed order.

All rows (tokens) that one rank sends to an expert belong to one microbatch. Each rank's rows are
computed with tensors of their own, called leaves, which share memory with the parameters, so that
autograd keeps the ranks' gradients apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.base.torch_private import own_parameters, to_local

Key = tuple[nn.Module, str]
"""A module, and the name of one of its own parameters."""
Parameters = Mapping[Key, Tensor]
"""The tensors with which modules compute in place of their parameters."""


def divided_parameters(module: nn.Module) -> Iterator[tuple[Key, DTensor]]:
    """Yield the parameters inside a module that are `DTensor`s: those that ranks divide."""
    for each in module.modules():
        for name, parameter in own_parameters(each).items():
            if isinstance(parameter, DTensor):
                yield (each, name), parameter


class Leaves:
    """For one module of experts: the tensors (leaves) in place of its parameters with which the
    rows of each rank are computed."""

    def __init__(self, module: nn.Module, ranks: int) -> None:
        self._module = module
        self.ranks = ranks
        self._tensors: dict[Key, list[nn.Parameter]] = {}

    def parameters_of(self, rank: int) -> Parameters:
        """Return the tensors that take the place of the module's parameters for the rows that rank
        `rank` of the axis `expert` has sent."""
        return {key: self.of(key)[rank] for key, _ in divided_parameters(self._module)}

    def within(self, modules: Collection[nn.Module]) -> list[nn.Parameter]:
        """Return all tensors with which the last forward has computed if `modules` contains the
        module of experts, else an empty list."""
        if self._module not in modules:
            return []
        return [each for tensors in self._tensors.values() for each in tensors]

    def key_of(self, parameter: Tensor) -> Key | None:
        """Return the module and the name under which this module of experts has the parameter; None
        if it does not have it."""
        pairs = divided_parameters(self._module)
        return next((key for key, each in pairs if each is parameter), None)

    def of(self, key: Key) -> list[nn.Parameter]:
        """Return the tensors that take the place of a parameter, one for the rows of each rank.
        Under FSDP2, call it only while the parameter is gathered."""
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
        """Return a parameter's gradient for the rows of each rank of the axis `expert` (None where
        there is none), and clear these gradients."""
        tensors = self._tensors.get(key)
        return [None] * self.ranks if tensors is None else list(map(_take, tensors))


class ParameterLeaves:
    """The tensors (leaves) whose `.grad` gets the gradient of one parameter in a backward: the
    parameter itself (under FSDP2 the gathered one, while it is gathered), or one tensor for the
    rows of each rank of the axis `expert`."""

    def __init__(
        self, parameter: nn.Parameter, leaves: Sequence[Leaves], key: Key | None = None
    ) -> None:
        """`leaves`: the `Leaves` of all divided modules of experts in the model. `key`: the module
        and the name under which the parameter, or under FSDP2 the gathered one, is found; None:
        `parameter` itself gets the gradient."""
        self._parameter = parameter
        self._key = key
        keys = ((each, each.key_of(parameter)) for each in leaves)
        self._place = next(((each, key) for each, key in keys if key is not None), None)

    @property
    def are_apart(self) -> bool:
        """True if the gradient is separate for the rows of each rank, False if it is one for all
        rows."""
        return self._place is not None

    @property
    def count(self) -> int:
        """The number of tensors that get the parameter's gradients."""
        return 1 if self._place is None else self._place[0].ranks

    def tensors(self) -> list[Tensor]:
        """Return the tensors that get the parameter's gradients."""
        if self._place is None:
            return [self._current]
        leaves, key = self._place
        return [*leaves.of(key)]

    def take(self) -> list[Tensor | None]:
        """Return the gradient of each of the tensors (None if it has none), and clear these
        gradients."""
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
    """Return, for each parameter of the model (under FSDP2, the sharded one), the tensors that get
    its gradients. `leaves`: the `Leaves` of all divided modules of experts. Under FSDP2, call it
    while parameters are sharded."""
    by_parameter: dict[nn.Parameter, ParameterLeaves] = {}
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not None and parameter not in by_parameter:
                by_parameter[parameter] = ParameterLeaves(parameter, leaves, (module, name))
    return by_parameter


def _take(tensor: Tensor) -> Tensor | None:
    gradient, tensor.grad = tensor.grad, None
    return gradient
