"""Finds networks and tensors that a script's training loop changes in place, but that no checkpoint
saves."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import tokenize
import weakref
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

from torch import Tensor, nn

from lockstep.base.contents import is_users_file
from lockstep.base.loop_flow import loop_at, set_anew
from lockstep.base.torch_private import version

_OWN_REFERENCES = 3


class LoopVariables:
    """Weak references to the networks and tensors in local variables of the script's function, at
    the start of its training loop."""

    def __init__(self, saved: Collection[int]) -> None:
        frame = frame_of_script()
        loop = loop_of(frame)
        anew = set() if loop is None else set_anew(loop)
        self._before = {
            name: [
                (weakref.ref(tensor), version(tensor))
                for tensor in _tensors(value)
                if id(tensor) not in saved
            ]
            for name, value in local_variables(frame).items()
            if isinstance(value, nn.Module | Tensor) and name not in anew
        }

    def changed(self) -> list[str]:
        """Return the names of variables whose tensors were changed in place since the start of the
        loop."""
        names = []
        for name, marks in self._before.items():
            now = [(tensor(), writes) for tensor, writes in marks]
            if any(each is not None and version(each) != writes for each, writes in now):
                names.append(name)
        return names


def frame_of_script() -> FrameType:
    """Return the innermost frame of the user's code."""
    frame = sys._getframe()
    while frame.f_back is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def loop_of(frame: FrameType) -> ast.For | None:
    """Return the `for` statement whose iterator the frame is advancing."""
    code, first = frame.f_code, 1
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    if not code.co_name.startswith("<"):  # a function; parsing the whole file takes longer
        first = code.co_firstlineno
        try:
            lines = list(inspect.getblock(lines[first - 1 :]))
        except (SyntaxError, tokenize.TokenError):
            return None
        if lines and lines[0][:1].isspace():
            lines, first = ["if True:\n", *lines], first - 1
    return loop_at("".join(lines), frame.f_lineno - first + 1)


def local_variables(frame: FrameType) -> dict[str, Any]:
    variables = frame.f_locals
    by_name = dict(variables)
    # before Python 3.13, a function's frame keeps this dict, and so keeps all its values alive
    is_copy = type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and sys.getrefcount(variables) == _OWN_REFERENCES:  # not the script's `locals()`
        variables.clear()
    return by_name


def _is_users(file: str) -> bool:
    return file.startswith("<") or is_users_file(file)


def _tensors(value: nn.Module | Tensor) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    else:
        yield value
