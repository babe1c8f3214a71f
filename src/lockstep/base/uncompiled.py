"""Hides functions from torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import torch


class Uncompiled:
    """Calls a function that torch.compile does not trace. A deep copy of an `Uncompiled` calls a
    deep copy of the function, unlike with `torch.compiler.disable` alone."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._set(function)

    def _set(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._called: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Uncompiled:
        made = copy(self)
        memo[id(self)] = made
        made._set(deepcopy(self._function, memo))
        return made
