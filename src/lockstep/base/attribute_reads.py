"""Reads a forward's code, and finds the attributes whose earlier value it uses."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from lockstep.base.contents import inner_code, is_users, variables_of

_LOADS = ("LOAD_ATTR", "LOAD_SUPER_ATTR")


def attributes_read(model: Any) -> set[str] | None:
    """Return the names of attributes that the forwards of the model's modules read, in methods and
    functions that they call too. An attribute that a function sets before it reads it does not
    count. None: the code of a forward is not known."""
    found: set[str] = set()
    seen: set[tuple[type, FunctionType]] = set()
    for module in model.modules():
        left = [getattr(module.forward, "__func__", module.forward)]
        if not isinstance(left[0], FunctionType):
            return None
        while left:
            function = inspect.unwrap(left.pop())
            if (type(module), function) in seen:
                continue
            seen.add((type(module), function))
            for code in inner_code(function.__code__):
                found |= set(_read_by(code))
                left += _methods(type(module), set(code.co_names))
            left += [
                each
                for each in variables_of(function).values()
                if isinstance(each, FunctionType) and is_users(each.__module__)
            ]
    return found


def _methods(kind: type, names: set[str]) -> Iterator[FunctionType]:
    """Yield a class's functions with these names, and its base classes'."""
    for each in kind.__mro__:
        for name in names & vars(each).keys():
            value = vars(each)[name]
            value = value.fget if isinstance(value, property) else value
            if isinstance(value := getattr(value, "__func__", value), FunctionType):
                yield value


def _read_by(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes that code reads before it sets them."""
    if "getattr" in code.co_names:
        yield from (each for each in code.co_consts if isinstance(each, str))
    is_set: set[str] = set()
    steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL")]
    for place, one in enumerate(steps):
        following = [each.opname for each in steps[place + 1 : place + 3]]
        if one.opname == "STORE_ATTR":
            is_set.add(one.argval)
        elif (
            one.opname in _LOADS
            and "NULL|" not in one.argrepr  # a call of a method, from Python 3.12 on
            and following != ["LOAD_CONST", "STORE_SUBSCR"]  # self.log["norm"] = value
        ):
            yield from {one.argval} - is_set
