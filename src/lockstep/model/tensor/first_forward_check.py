"""Checks, at the first forward, that modules with layers that are sharded over the `tensor` axis
return the same as with full layers. Code that computes on a shard of the features can give a wrong
result without an error. For example, `query.view(batch, length, heads, -1)` makes heads of half the
depth.

A module's first forward in training mode, and in evaluation mode, is run again with sharded layers
and with full layers, and the same random numbers. If dropout would draw different masks, both
forwards run in evaluation mode. Only the first of several equal modules is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.base.nested import tree_tensors
from lockstep.base.torch_private import (
    BatchNormBase,
    disable_current_modes,
    own_buffers,
    own_parameters,
    tree_map,
)
from lockstep.model.running_statistics import self_updating
from lockstep.model.tensor.marks import is_sharded
from lockstep.model.tensor.sharded_logits import gather_full
from lockstep.model.trial import trial

ROUNDINGS = 8.0
"""Largest allowed relative error (in the norm), in units of the square root of the dtype's eps."""
MAX_GATHERED_ELEMENTS = 2**26
"""A module is checked if the full weights of its sharded layers have at most this many elements. A
module is also checked if it has at most half of the elements of all sharded layers."""


class FirstForwardCheck:
    """Compares the outputs of a module with sharded layers and with full layers."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        on_sequence: Sequence[str],
        unsharded_now: set[str],
        *,
        draws_alike: bool,
    ) -> None:
        """The layers in `on_sequence` return a shard of the sequence. `draws_alike` is False if
        sharded layers may draw different random numbers than full layers."""
        self._modules = {name: model.get_submodule(name) for name in layers}
        self._on_sequence = {name: model.get_submodule(name) for name in on_sequence}
        self._unchecked = {training: set(layers) for training in (True, False)}
        self._unsharded_now = unsharded_now
        self._checked_kinds: set[Any] = set()
        self._comparing = False
        self._draws_alike = draws_alike

    def compare(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Any,
        keywords: Any,
    ) -> None:
        """Do nothing if the module's inputs or outputs are sharded. `forward` is the module's
        original forward. Every rank must call this method."""
        unchecked = self._unchecked[module.training]
        if self._comparing or not unchecked:
            return
        prefix = f"{name}." if name else ""
        inside = [
            layer for layer in self._modules if layer in unchecked and layer.startswith(prefix)
        ]
        if not inside:
            return
        layers = [(layer.removeprefix(name), type(self._modules[layer])) for layer in inside]
        kind = type(module), module.training, *layers
        most = max(MAX_GATHERED_ELEMENTS, self._size(self._modules) // 2)
        if kind not in self._checked_kinds and self._size(inside) <= most:
            given = [_plain(list(arguments)), _plain(keywords)]
            _, *children = module.modules()
            blocks = any(isinstance(child, FSDPModule) for child in children)
            if blocks or any(map(is_sharded, tree_tensors(given))):
                return
            given = tree_map(
                lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, given
            )
            in_evaluation = not self._draws_alike or _on_accelerator(given)
            self._comparing = True
            try:
                with (
                    trial(),
                    torch.no_grad(),
                    disable_current_modes(),
                    _evaluating(
                        each
                        for each in module.modules()
                        if in_evaluation or isinstance(each, BatchNormBase) or self_updating(each)
                    ),
                    _same_numbers(given),
                ):
                    with _same_numbers(given), _unchanged(module):
                        sharded = tree_tensors(forward(*given[0], **given[1]))
                    if any(map(is_sharded, sharded)):
                        return
                    given = tree_map(gather_full, given)
                    others = [name for name in self._on_sequence if name.startswith(prefix)]
                    with self._with_full_weights([*inside, *others]), _unchanged(module):
                        whole = tree_tensors(forward(*given[0], **given[1]))
                self._check(name or type(module).__name__, inside, sharded, whole)
            finally:
                self._comparing = False
            self._checked_kinds.add(kind)
        unchecked.difference_update(inside)

    def _size(self, names: Iterable[str]) -> int:
        return sum(
            parameter.numel() for name in names for parameter in self._modules[name].parameters()
        )

    @contextmanager
    def _with_full_weights(self, names: list[str]) -> Iterator[None]:
        modules = {name: (self._modules | self._on_sequence)[name] for name in names}
        parts = {name: dict(own_parameters(module)) for name, module in modules.items()}
        try:
            for name, module in modules.items():
                own_parameters(module).update(
                    {
                        each: (
                            None
                            if part is None
                            else nn.Parameter(gather_full(part), requires_grad=part.requires_grad)
                        )
                        for each, part in parts[name].items()
                    }
                )
            self._unsharded_now.update(names)
            yield
        finally:
            for name, module in modules.items():
                own_parameters(module).update(parts[name])
            self._unsharded_now.difference_update(names)

    def _check(
        self, name: str, layers: list[str], sharded: list[Tensor], whole: list[Tensor]
    ) -> None:
        for found, truth in zip(map(gather_full, sharded), map(gather_full, whole), strict=True):
            if not truth.is_floating_point():
                continue
            kinds = [truth.dtype]
            if torch.is_autocast_enabled(truth.device.type):
                kinds.append(torch.get_autocast_dtype(truth.device.type))
            allowed = ROUNDINGS * max(torch.finfo(kind).eps for kind in kinds) ** 0.5
            error = math.inf
            if found.shape == truth.shape:
                error = float((found.double() - truth.double()).norm() / truth.double().norm())
            if error > allowed:
                raise RecipeError(
                    f"{name} computes something else with its layers "
                    f"{', '.join(layer.removeprefix(f'{name}.') for layer in layers)} sharded over "
                    f"the tensor axis: its first output differs by {error:.1g} of its size, where "
                    f"rounding explains {allowed:.1g}; code between a 'colwise' and a 'rowwise' "
                    "layer must compute each head, or each feature, separately: write "
                    "query.view(batch, length, -1, head_dim), with -1 for the heads; use no norm "
                    "or softmax over the features, and separate layers for query, key and value; "
                    "or give these layers 'colwise_gathered' and 'rowwise_split'"
                )


@contextmanager
def _evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    modes = [(each, each.training) for each in modules]
    try:
        for each, _ in modes:
            each.training = False
        yield
    finally:
        for each, training in modes:
            each.training = training


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    generators = [
        each
        for own in module.modules()
        for each in vars(own).values()
        if isinstance(each, torch.Generator)
    ]
    states = [each.get_state() for each in generators]
    attributes = [(vars(each), dict(vars(each))) for each in module.modules()]
    buffers = [(own_buffers(each), dict(own_buffers(each))) for each in module.modules()]
    try:
        for own, before in buffers:
            own.update({name: None if b is None else b.clone() for name, b in before.items()})
        yield
    finally:
        for own, before in (*buffers, *attributes):
            own.clear()
            own.update(before)
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)


def _on_accelerator(given: Any) -> bool:
    return any(map(accelerator.is_accelerator, tree_tensors(given)))


@contextmanager
def _same_numbers(given: Any) -> Iterator[None]:
    devices = {leaf.device for leaf in tree_tensors(given) if accelerator.is_accelerator(leaf)}
    with accelerator.preserved_generators(*devices):
        yield


def _plain(item: Any) -> Any:
    if isinstance(item, dict):
        return {name: _plain(member) for name, member in item.items()}
    if type(item) in (list, tuple):
        return type(item)(map(_plain, item))
    return (
        item
        if isinstance(item, Tensor | int | float | str | torch.dtype | torch.device | nn.Module)
        else None
    )
