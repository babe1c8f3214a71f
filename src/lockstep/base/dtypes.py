"""Names of torch's dtypes. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TensorSpec = tuple[str, tuple[int, ...]]
"""Tuple of torch's name of the dtype, and the shape."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def tensor_spec(tensor: Tensor) -> TensorSpec:
    return dtype_name(tensor.dtype), tuple(tensor.shape)
