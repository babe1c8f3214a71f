"""State that a forward leaves in attributes and buffers, restored after a trial."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.torch_private import MODULE_ATTRIBUTES, own_buffers


@contextmanager
def restored(dicts: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Restore each dict's values on leaving: their identity, and the contents of tensors and
    containers."""
    kept = [_Attributes(attributes) for attributes in dicts]
    try:
        yield
    finally:
        for attributes in kept:
            attributes.restore()


def attributes_of(each: object) -> Iterator[dict[str, Any]]:
    """Yield an object's attributes; of a module also its children's, and buffers."""
    if isinstance(each, nn.Module):
        for module in each.modules():
            yield from (vars(module), own_buffers(module))
    elif hasattr(each, "__dict__") and not isinstance(each, type):
        yield vars(each)


class _Attributes:
    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self._values = dict(attributes)
        self._contents = {
            name: _copied(value)
            for name, value in attributes.items()
            if name not in MODULE_ATTRIBUTES
        }

    def restore(self) -> None:
        for name in self._attributes.keys() - self._values.keys():
            del self._attributes[name]
        for name, value in self._values.items():
            if self._attributes.get(name) is not value:
                self._attributes[name] = value
        for name, content in self._contents.items():
            if content is not None:
                _put_back(self._values[name], content)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            value.detach().clone()
            if type(value) is Tensor and value.layout == torch.strided
            else None
        )
    return value.copy() if type(value) in (list, dict, set, deque) else None


def _put_back(value: Any, content: Any) -> None:
    if not isinstance(value, Tensor):
        value.clear()
        value.update(content) if isinstance(value, dict | set) else value.extend(content)
    elif value.shape == content.shape and not torch.equal(value, content):
        with torch.no_grad():
            value.copy_(content)
