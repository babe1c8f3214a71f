"""A second device on a machine that has none: tensors with values, on which no operation takes
another device's tensors.

Torch takes them for tensors on its meta device, and a dispatch mode computes with the values, which
are in the CPU's memory. The CPU stands for another device of the same kind: not even a scalar of it
may meet them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

ELSEWHERE = torch.device("meta")
CROSSES = ("aten::_to_copy", "aten::copy_")


class There(Tensor):
    """A tensor on the second device."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> There:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=ELSEWHERE,
        )
        made.value = value
        return made

    @property
    def is_meta(self) -> bool:
        return False

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class SecondDevice(TorchDispatchMode):
    """Within it, `ELSEWHERE` is a device with values."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[int] = []
        """Numbers of elements that went to it or came back, one entry a move."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == "aten::_to_copy" and kwargs.get("device") is not None:
            crosses = isinstance(args[0], There) != (kwargs["device"] == ELSEWHERE)
            if crosses:
                self.moves.append(args[0].numel())
        return _computed(func, args, kwargs)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    target = kwargs.get("device")
    if target is not None and torch.device(target) == ELSEWHERE:
        kwargs = {**kwargs, "device": torch.device("cpu")}
        return tree_map(_there, func(*_values(args), **_values(kwargs)))
    if not any(isinstance(tensor, There) for tensor in given):
        return func(*args, **kwargs)
    if name == "aten::_to_copy":
        moved = func(*_values(args), **_values(kwargs))
        return moved if target is not None else There(moved)
    if name in ("aten::_local_scalar_dense", "aten::equal"):
        return func(*_values(args), **_values(kwargs))
    if name.startswith("aten::_foreach"):
        return _row_by_row(func, args, kwargs)
    if name not in CROSSES:
        _check_one_device(name, given)
    out = tree_map(_there, func(*_values(args), **_values(kwargs)))
    return return_and_correct_aliasing(func, args, kwargs, out)


def _row_by_row(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on lists, done on the first of each, then the second of each."""
    results = []
    for place in range(len(args[0])):
        row, named = (
            [[a[place]] if isinstance(a, list | tuple) else a for a in each]
            for each in (args, kwargs.values())
        )
        tensors = [leaf for leaf in tree_flatten((row, named))[0] if isinstance(leaf, Tensor)]
        _check_one_device(func._schema.name, tensors)
        result = func(*_values(row), **_values(dict(zip(kwargs, named, strict=True))))
        if result is not None:
            results += [There(each) if isinstance(row[0][0], There) else each for each in result]
    return results or None


def _check_one_device(name: str, tensors: list[Tensor]) -> None:
    if len({isinstance(tensor, There) for tensor in tensors}) > 1:
        raise RuntimeError(
            f"{name}: Expected all tensors to be on the same device, but found at least two devices"
        )


def _there(item: Any) -> Any:
    return There(item) if isinstance(item, Tensor) else item


def _values(tree: Any) -> Any:
    return tree_map(lambda item: item.value if isinstance(item, There) else item, tree)
