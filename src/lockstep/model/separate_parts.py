"""Computes a model's sequential parts (the modules that the model calls one after another) as if
each part were in a separate process. With numerics=bitwise, one process then computes the same bits
as a pipeline of any size. A tensor between two parts has the strides of a new tensor, as if the
tensor had been received. The gradient of a tensor between two parts has the same strides. A
parameter that several parts share is a separate leaf of autograd's graph in each part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import (
    is_distributed,
    own_parameters,
    storage_address,
    tree_map,
)


class SeparateParts:
    def __init__(
        self, model: nn.Module, parts: Sequence[str], shared: Sequence[str], *, last: str
    ) -> None:
        """`parts` are the sequential parts on this rank. `shared` and `last` describe the full
        model."""
        modules = {name: model.get_submodule(name) for name in parts}
        once = {id(each): each for name, each in modules.items() if name != last}
        self._handles = [each.register_forward_hook(_separate) for each in once.values()]
        self.leaves: dict[str, list[PartLeaf]] = {}
        """The leaves of each shared parameter, in the order of this rank's parts. The parameter
        itself is the leaf of the first part, which has no entry."""
        self._in_place: list[PartLeaf] = []
        named = dict(model.named_parameters())
        for name in shared:
            if (parameter := named.get(name)) is None:
                continue
            holders = [
                part for part in modules.values() if any(p is parameter for p in part.parameters())
            ]
            self.leaves[name] = [PartLeaf(parameter, part, self._in_place) for part in holders[1:]]
            for leaf in self.leaves[name]:
                self._handles += leaf.install()

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """A context in which other forwards may run."""
        aside = [(leaf, leaf.take_out()) for leaf in list(self._in_place)]
        try:
            yield
        finally:
            for leaf, used in aside:
                leaf.put_in(used)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class PartLeaf:
    """The leaf of autograd's graph that stands for a shared parameter in one part of the model."""

    def __init__(self, shared: nn.Parameter, part: nn.Module, in_place: list[PartLeaf]) -> None:
        """`in_place` contains this leaf while a forward of the part runs."""
        self.shared = shared
        self.part = part
        self.parameter = nn.Parameter(shared.detach())
        """The leaf shares memory with the original parameter."""
        self.gathered: nn.Parameter | None = None
        """The leaf of the all-gathered parameter, which shares the parameter's memory. None without
        sharding."""
        self._in_place = in_place
        self._owners = [
            (own_parameters(module), name)
            for module in part.modules()
            for name, parameter in own_parameters(module).items()
            if parameter is shared
        ]
        self._replaced: nn.Parameter | None = None

    def install(self) -> list[Any]:
        return [
            self.part.register_forward_pre_hook(self._before_forward),
            self.part.register_forward_hook(self._after_forward, prepend=True, always_call=True),
        ]

    def tensors(self) -> list[Tensor]:
        return [self.parameter if self.gathered is None else self.gathered]

    def take(self) -> list[Tensor | None]:
        (leaf,) = self.tensors()
        gradient, leaf.grad = leaf.grad, None
        return [gradient]

    def put_in(self, leaf: nn.Parameter) -> None:
        own, name = self._owners[0]
        self._replaced = own[name]
        self._put(leaf)
        self._in_place.append(self)

    def take_out(self) -> nn.Parameter:
        own, name = self._owners[0]
        used, replaced = own[name], self._replaced
        assert isinstance(used, nn.Parameter)
        assert replaced is not None, "put_in comes first"
        self._put(replaced)
        self._replaced = None
        self._in_place.remove(self)
        return used

    def _before_forward(self, _: nn.Module, __: Any) -> None:
        own, name = self._owners[0]
        current = own[name]
        if current is None or not current.requires_grad or not torch.is_grad_enabled():
            return
        if current is self.shared:
            leaf = self.parameter
            if leaf.data_ptr() != current.data_ptr():  # its `data` has been replaced
                leaf.data = current.data
        elif is_distributed(self.shared) and isinstance(current, nn.Parameter):
            leaf = self._leaf_on_gathered(current)
        else:
            return  # the forward uses another tensor, as with torch.func.functional_call
        self.put_in(leaf)

    def _leaf_on_gathered(self, current: nn.Parameter) -> nn.Parameter:
        leaf = self.gathered
        memory = storage_address(current.untyped_storage())
        if leaf is None or storage_address(leaf.untyped_storage()) != memory:
            leaf = self.gathered = nn.Parameter(current.data)
        return leaf

    def _after_forward(self, _: nn.Module, __: Any, ___: Any) -> None:
        if self._replaced is not None:
            self.take_out()

    def _put(self, parameter: nn.Parameter) -> None:
        for own, name in self._owners:
            own[name] = parameter


def check_separable(model: nn.Module, parts: Sequence[str]) -> None:
    first: dict[int, str] = {}
    for name in parts:
        module = model.get_submodule(name)
        before = first.setdefault(id(module), name)
        if before != name and any(each.requires_grad for each in module.parameters()):
            raise RecipeError(
                f"numerics=bitwise with one module for two parts of the model, {before!r} and"
                f" {name!r}; the gradients of each part are summed separately; give each part its"
                " own module, and share the parameters: second.weight = first.weight"
            )


def _separate(_: nn.Module, __: Any, output: Any) -> Any:
    return tree_map(_separated, output)


def _separated(value: Any) -> Any:
    if not isinstance(value, Tensor) or is_distributed(value):
        return value
    return _Separate.apply(value) if value.requires_grad else _as_new(value)  # type: ignore[no-untyped-call]


class _Separate(torch.autograd.Function):
    """The identity. The output and the input's gradient have the strides of new contiguous
    tensors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return _as_new(tensor.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _as_new(gradient)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


def _as_new(tensor: Tensor) -> Tensor:
    sizes = [max(size, 1) for size in tensor.shape]
    strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    return tensor if tensor.stride() == strides else tensor.reshape(-1).view(tensor.shape)
