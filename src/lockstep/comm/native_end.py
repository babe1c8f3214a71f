"""Calls a Python function before C++ ends this process by `std::terminate`. Gloo ends the process
if ranks exchange tensors of different sizes. Linux with libstdc++ only."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_HANDLER = ctypes.CFUNCTYPE(None)
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"


class NativeEnd:
    """Calls `before` in the thread in which C++ calls `std::terminate`. `close` disables the call
    of `before`."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._set: Any = None
        try:
            self._set = getattr(ctypes.CDLL("libstdc++.so.6"), _SET_TERMINATE)
        except (OSError, AttributeError):  # another C++ runtime than libstdc++
            return
        self._set.argtypes, self._set.restype = [ctypes.c_void_p], ctypes.c_void_p

        def handler() -> None:
            try:
                before()
            finally:
                _HANDLER(self._former)()

        self._handler = _HANDLER(handler)  # C++ keeps no reference
        self._former: int = self._set(ctypes.cast(self._handler, ctypes.c_void_p))

    def close(self) -> None:
        if self._set is not None:
            self._set(self._former)
            self._set = None
