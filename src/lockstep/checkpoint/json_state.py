"""Nested state dicts as JSON. Tensors are replaced by names, made from their paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base.dtypes import dtype_name
from lockstep.base.errors import CheckpointError
from lockstep.checkpoint.tensor_shards import DTYPES

_TAG = "lockstep"
"""Marks values of types that JSON lacks. A dict that has this key is encoded as a list of items."""


REMEDY = "have its state_dict return those, or leave it out"


def encode(value: Any, name: str, tensors: dict[str, Tensor], remedy: str = REMEDY) -> Any:
    """Tensors are added to `tensors` by path, such as `average/fc.weight`. Accepts JSON's types,
    tuples, tensors, and NumPy numbers and arrays."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
    if isinstance(value, np.generic | np.ndarray):
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise _cannot(name, f"a numpy array of {array.dtype}", remedy)
        encoded = encode(torch.from_numpy(array.copy()), name, tensors, remedy)
        return {_TAG: "numpy", "value": encoded, "scalar": isinstance(value, np.generic)}
    if isinstance(value, Tensor):
        return _reference_to(value, name, tensors, remedy)
    if isinstance(value, list | tuple):
        items = [encode(item, f"{name}/{at}", tensors, remedy) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "value": items}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int | float | bool | None):
                raise _cannot(name, f"a dict with a key {key!r} (a {type(key).__name__})", remedy)
        pairs = [
            [key, encode(item, f"{name}/{key}", tensors, remedy)] for key, item in value.items()
        ]
        is_json = all(isinstance(key, str) for key in value) and _TAG not in value
        return dict(pairs) if is_json else {_TAG: "dict", "value": pairs}
    raise _cannot(name, f"a {type(value).__qualname__}", remedy)


def decode(encoded: Any, tensor: Callable[[str], Tensor]) -> Any:
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


def tensor_names_in(encoded: Any) -> list[str]:
    if isinstance(encoded, list):
        return [name for item in encoded for name in tensor_names_in(item)]
    if not isinstance(encoded, dict):
        return []
    if encoded.get(_TAG) == "tensor":
        return [encoded["value"]]
    return [name for item in encoded.values() for name in tensor_names_in(item)]


def _reference_to(tensor: Tensor, name: str, tensors: dict[str, Tensor], remedy: str) -> Any:
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    if not is_dense or dtype_name(tensor.dtype) not in DTYPES:
        what = f"a tensor of layout {tensor.layout}, type {tensor.dtype}, on device {tensor.device}"
        raise _cannot(name, what, remedy)
    while name in tensors:  # {"a": {"b": ...}, "a/b": ...}, or {1: ..., "1": ...}
        name += "'"
    tensors[name] = tensor.detach()
    return {_TAG: "tensor", "value": name}


def _cannot(name: str, what: str, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"the state {name!r} is {what}; a checkpoint holds dense tensors, numbers, text, None, and"
        f" lists, tuples and dicts of them (nothing that takes a pickle); {remedy}"
    )
