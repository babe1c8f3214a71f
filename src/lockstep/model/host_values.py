"""The functions of torch that give a tensor's values to Python."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def functions_named(*names: str) -> frozenset[Any]:
    found = (getattr(owner, name, None) for owner in (torch, Tensor) for name in names)
    return frozenset(each for each in found if each is not None)


READS = functions_named(
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "item", "tolist"),
    *("equal", "allclose", "is_nonzero"),
)
ARRAYS = functions_named("numpy", "__array__")
