"""Finds networks and tensors that a script's training loop changes in place, but that no checkpoint
saves."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
import tokenize
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from lockstep.base.contents import is_users, is_users_file
from lockstep.base.loop_flow import (
    Helper,
    helpers_called,
    loop_at,
    set_anew,
    steps_of,
    steps_passed,
)
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


def helpers_of(loop: ast.For, variables: Mapping[str, Any]) -> dict[str, Helper]:
    """Return the script's functions that get the loop's step, from the loop or from each other."""
    helpers: dict[str, Helper] = {}
    left: list[tuple[ast.AST, set[str], Mapping[str, Any]]] = [(loop, steps_of(loop), variables)]
    while left:
        body, steps, known = left.pop()
        for call in helpers_called(body, steps):
            path = ast.unparse(call.func)
            found, is_method = _function_at(path, known)
            if path in helpers or found is None or not is_users(found.__module__):
                continue
            # the source file is missing, or was edited since the function was defined
            with suppress(OSError, TypeError, SyntaxError, tokenize.TokenError):
                code = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
                if isinstance(code, ast.FunctionDef):
                    helpers[path] = helper = Helper(code, is_method)
                    own = steps_passed(call, helper, steps)
                    left.append((code, own, {**known, **found.__globals__}))
    return helpers


def _function_at(path: str, variables: Mapping[str, Any]) -> tuple[FunctionType | None, bool]:
    """Return the function at a path such as `trainer.train_step`. True for a method."""
    name, *names = path.split(".")
    owner, value = None, variables.get(name)
    for each in names:
        owner, value = value, inspect.getattr_static(value, each, None)
    is_method = bool(names) and not isinstance(owner, ModuleType)
    return (value, is_method) if isinstance(value, FunctionType) else (None, False)


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
