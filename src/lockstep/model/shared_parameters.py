"""Shared parameters: those that a model has under several names (tied weights)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def share_parameter(model: nn.Module, names: Sequence[str]) -> None:
    """Make the parameters under these names one object again: the DTensor, if one of them is a DTensor."""
    found = [model.get_parameter(name) for name in names]
    one = next((parameter for parameter in found if isinstance(parameter, DTensor)), found[0])
    for name in names:
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_parameter(attribute, one)
