"""A call that compiled code does not look into."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import torch


class Uncompiled:
    """Calls a function outside compiled code. Unlike with `torch.compiler.disable`, a deep copy
    calls a deep copy of the function: if it is a model's bound method, the copied model's."""

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
