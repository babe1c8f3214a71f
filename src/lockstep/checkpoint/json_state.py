"""Nested state dicts as JSON. Tensors are taken out, each named by its path."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base.errors import CheckpointError
from lockstep.checkpoint.tensor_shards import DTYPES

_TAG = "lockstep"
"""Marks values that JSON lacks: {"lockstep": kind, "value": ...}. A dict with this key is encoded
as a list of items."""


REMEDY = "have its state_dict return those, or leave it out"


def encode(value: Any, name: str, tensors: dict[str, Tensor], remedy: str = REMEDY) -> Any:
    """Convert `value` to JSON. Its tensors are added to `tensors` by path, as in
    `average/fc.weight`.

    Raises `CheckpointError`, with path, type and `remedy`, unless it holds JSON's types, tuples,
    tensors, and NumPy numbers and arrays alone.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
    if isinstance(value, np.generic | np.ndarray):
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise _cannot(name, f"a numpy array of {array.dtype}", remedy)
        return {
            _TAG: "numpy",
            "value": encode(torch.from_numpy(array.copy()), name, tensors, remedy),
            "scalar": isinstance(value, np.generic),
        }
    if isinstance(value, Tensor):
        return _named(value, name, tensors, remedy)
    if isinstance(value, list | tuple):
        items = [
            encode(item, f"{name}/{place}", tensors, remedy) for place, item in enumerate(value)
        ]
        return items if isinstance(value, list) else {_TAG: "tuple", "value": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {
                key: encode(item, f"{name}/{key}", tensors, remedy) for key, item in value.items()
            }
        for key in value:
            if not isinstance(key, str | int | float | bool | None):
                raise _cannot(name, f"a dict with a key {key!r} (a {type(key).__name__})", remedy)
        return {
            _TAG: "dict",
            "value": [
                [key, encode(item, f"{name}/{key}", tensors, remedy)] for key, item in value.items()
            ],
        }
    raise _cannot(name, f"a {type(value).__qualname__}", remedy)


def decode(encoded: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Invert `encode`. `tensor`: name -> tensor."""
    if isinstance(encoded, list):
        return [decode(item, tensor) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if _TAG not in encoded:
        return {key: decode(item, tensor) for key, item in encoded.items()}
    kind, value = encoded[_TAG], encoded["value"]
    if kind == "float":
        return float(value)
    if kind == "tensor":
        return tensor(value)
    if kind in ("tuple", "dict"):
        return (tuple if kind == "tuple" else dict)(decode(value, tensor))
    array = decode(value, tensor).cpu().numpy()
    return array[()] if encoded["scalar"] else array


def tensors_in(encoded: Any) -> list[str]:
    """Return the names of the tensors in an encoded value."""
    if isinstance(encoded, list):
        return [name for item in encoded for name in tensors_in(item)]
    if not isinstance(encoded, dict):
        return []
    if encoded.get(_TAG) == "tensor":
        return [encoded["value"]]
    return [name for item in encoded.values() for name in tensors_in(item)]


def _named(tensor: Tensor, name: str, tensors: dict[str, Tensor], remedy: str) -> Any:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (
        tensor.layout != torch.strided
        or tensor.is_meta
        or tensor.is_quantized
        or dtype not in DTYPES
    ):
        raise _cannot(
            name,
            f"a tensor of layout {tensor.layout}, type {tensor.dtype}, on device {tensor.device}",
            remedy,
        )
    while name in tensors:  # {"a": {"b": ...}, "a/b": ...}, or {1: ..., "1": ...}
        name += "'"
    tensors[name] = tensor.detach()
    return {_TAG: "tensor", "value": name}


def _cannot(name: str, what: str, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"the state {name!r} is {what}; a checkpoint holds dense tensors, numbers, text, None, and"
        f" lists, tuples and dicts of them (nothing that takes a pickle); {remedy}"
    )
