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
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import suppress
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from lockstep.base.contents import is_users, is_users_file, variables_of
from lockstep.base.loop_flow import Helper, loop_at, passed_to, path_of, set_anew, steps_passed
from lockstep.base.torch_private import version

_OWN_REFERENCES = 3
_MOST_LEVELS = 8
"""Maximum number of functions that call each other and are followed."""


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


class Helpers:
    """Finds the script's functions that a loop uses, and those that they use. Methods are found
    only if they get the loop's step."""

    def __init__(self, frame: FrameType) -> None:
        code, self._globals = frame.f_code, frame.f_globals
        self._cells = {*code.co_cellvars, *code.co_freevars}
        self.local_names = {*code.co_varnames, *self._cells}
        """The variables of the loop's function, which hide those of its module."""
        self._found: dict[Any, Helper] = {}
        self._codes: dict[FunctionType, ast.FunctionDef | None] = {}
        self.modules: dict[str, ModuleType] = {}
        """The modules of functions from other files, by the last part of their names."""

    def used_by(
        self, body: ast.AST, steps: Set[str], variables: Mapping[str, Any], level: int = 0
    ) -> dict[str, Helper]:
        """Return the helpers that `body` uses, by their paths. `steps` are the names of variables
        that hold the step."""
        helpers: dict[str, Helper] = {}
        nodes = list(ast.walk(body))
        inner = {each.name for each in nodes if isinstance(each, ast.FunctionDef)}
        calls = [each for each in nodes if isinstance(each, ast.Call)]
        names = [each for each in nodes if isinstance(each, ast.Name | ast.Attribute)]
        for call in (*calls, *(ast.Call(each, [], []) for each in names)):
            path = path_of(call.func)
            if path is None or path in helpers or path.partition(".")[0] in inner:
                continue
            function, is_method = _function_at(path, variables)
            if function is None or level == _MOST_LEVELS:
                continue
            if function not in self._codes:
                self._codes[function] = _code_of(function)
            if (code := self._codes[function]) is None:
                continue
            own = steps_passed(call, Helper(code, is_method), steps)
            free = {*function.__code__.co_freevars}
            if not own and (is_method or not free <= self._cells):
                continue
            values = {
                name: _value_at(path_of(each), variables)
                for name, each in passed_to(call, Helper(code, is_method)).items()
            }
            key = (function, is_method, *own, *((name, id(each)) for name, each in values.items()))
            if key not in self._found:
                module = None
                if function.__globals__ is not self._globals:
                    module = function.__module__.rpartition(".")[2]
                    self.modules[module] = sys.modules[function.__module__]
                self._found[key] = helper = Helper(code, is_method, module, free & self._cells)
                known = {**variables_of(function), **values}
                helper.helpers |= self.used_by(code, own, known, level + 1)
            helpers[path] = self._found[key]
        return helpers

    def codes(self) -> list[ast.FunctionDef]:
        return [each.code for each in self._found.values()]


def _code_of(function: FunctionType) -> ast.FunctionDef | None:
    if sys.modules.get(function.__module__) is None or not is_users(function.__module__):
        return None
    # the source file is missing, or was edited since the function was defined
    with suppress(OSError, TypeError, ValueError, SyntaxError, tokenize.TokenError):
        code = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        return code if isinstance(code, ast.FunctionDef) else None
    return None


def _value_at(path: str | None, variables: Mapping[str, Any]) -> Any:
    name, *names = (path or "").split(".")
    value = variables.get(name)
    for each in names:
        value = inspect.getattr_static(value, each, None)
    return value


def _function_at(path: str, variables: Mapping[str, Any]) -> tuple[FunctionType | None, bool]:
    """Return the function at a path such as `trainer.train_step`, or the `__call__` of an object.
    True if it is a method, whose first argument is the object or class."""
    value, is_method = _value_at(path, variables), False
    if "." in path:
        owner, _, name = path.rpartition(".")
        holder = _value_at(owner, variables)
        is_method = isinstance(value, classmethod) or (
            not isinstance(value, staticmethod)
            and not isinstance(holder, type | ModuleType)
            and inspect.getattr_static(type(holder), name, None) is value
        )
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif not isinstance(value, FunctionType | type):
        value, is_method = inspect.getattr_static(type(value), "__call__", None), True
    for _ in range(_MOST_LEVELS):  # `inspect.unwrap` calls a `__getattr__` of the script
        value = vars(value).get("__wrapped__", value) if isinstance(value, FunctionType) else None
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
