"""Finds networks and tensors in variables of a script's own loop that change, but that no
checkpoint holds."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from lockstep.base.torch_private import version


class LoopVariables:
    """The networks and tensors that the script's function has in variables when its loop begins."""

    def __init__(self, saved: Collection[int]) -> None:
        """`saved`: ids of the tensors that checkpoints hold."""
        self._tensors = {
            name: [tensor for tensor in _tensors(value) if id(tensor) not in saved]
            for name, value in _variables_of_script().items()
            if isinstance(value, nn.Module | Tensor)
        }
        self._before = self._versions()

    def changed(self) -> list[str]:
        """Return the names of those that have been changed in place."""
        return [name for name, now in self._versions().items() if now != self._before[name]]

    def _versions(self) -> dict[str, list[int]]:
        return {name: list(map(version, tensors)) for name, tensors in self._tensors.items()}


def _variables_of_script() -> dict[str, Any]:
    """Return the variables of the innermost function that is not lockstep's."""
    frame = sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return dict(frame.f_locals)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("lockstep", "contextlib", "torch")


def _tensors(value: nn.Module | Tensor) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    else:
        yield value
