"""Maps functions over tensors in dicts, lists, tuples and dataclasses, such as a batch."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from lockstep.base.torch_private import tree_leaves


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return map_parts(value, function, lambda thing: thing)


def tensors_in(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(value, note)
    return tensors


def tree_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in dicts, lists, tuples, and other nodes of torch's pytrees."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_parts(
    value: Any, of_tensor: Callable[[Tensor], Tensor], of_thing: Callable[[Any], Any]
) -> Any:
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, type):
        return value
    if hasattr(value, "to") and not isinstance(value, UserDict):  # a BatchEncoding has one
        return of_thing(value)
    if isinstance(value, Mapping):
        parts = {name: map_parts(part, of_tensor, of_thing) for name, part in value.items()}
        if type(value) is dict:
            return parts
        changed: Any = copy.copy(value)
        for name, part in parts.items():  # the outputs of transformers refuse `update`
            changed[name] = part
        return changed
    if isinstance(value, list | tuple):
        moved = [map_parts(part, of_tensor, of_thing) for part in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if is_dataclass(value):
        changed = copy.copy(value)
        for field in fields(value):
            object.__setattr__(
                changed, field.name, map_parts(getattr(value, field.name), of_tensor, of_thing)
            )
        return changed
    return value
