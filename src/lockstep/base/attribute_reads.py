"""Analyses the bytecode of a module's `forward`, to find attributes and variables that carry a
value from one call to the next."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from lockstep.base.contents import inner_code, is_users, variables_of

_LOADS = ("LOAD_ATTR", "LOAD_SUPER_ATTR", "LOAD_GLOBAL", "LOAD_DEREF")
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")


def names_read(model: Any) -> set[str] | None:
    """Return the names of attributes and variables that the model's forwards read. Omits names that
    a function sets before it reads them. Omits names that a function only adds to (`self.calls +=
    1`). None if the code of a forward is unknown."""
    return names_read_by_all(functions_of(model))


def names_read_by_dataset(dataset: Any) -> set[str] | None:
    methods = [getattr(type(dataset), name, None) for name in ("__getitem__", "__getitems__")]
    return names_read_by_all(
        each
        for method in methods
        if method is not None
        for each in functions_called(type(dataset), method)
    )


def names_read_by(function: FunctionType) -> set[str]:
    return {name for code in inner_code(function.__code__) for name in _read_by(code)}


def functions_of(model: Any) -> Iterator[FunctionType | None]:
    seen: set[tuple[type, Any]] = set()
    for module in model.modules():
        forward = getattr(module.forward, "__func__", module.forward)
        if (type(module), forward) not in seen:
            seen.add((type(module), forward))
            yield from functions_called(type(module), forward)


def functions_called(kind: type, first: Any) -> Iterator[FunctionType | None]:
    left, seen = [first], set[FunctionType]()
    while left:
        function = inspect.unwrap(left.pop())
        if not isinstance(function, FunctionType):
            yield None
        elif function not in seen:
            seen.add(function)
            yield function
            for code in inner_code(function.__code__):
                left += _methods(kind, set(code.co_names))
            left += [
                each
                for each in variables_of(function).values()
                if isinstance(each, FunctionType) and is_users(each.__module__)
            ]


def names_read_by_all(functions: Iterable[FunctionType | None]) -> set[str] | None:
    found: set[str] = set()
    for function in functions:
        if function is None:
            return None
        found |= names_read_by(function)
    return found


def _methods(kind: type, names: set[str]) -> Iterator[FunctionType]:
    for each in kind.__mro__:
        for name in names & vars(each).keys():
            value = vars(each)[name]
            value = value.fget if isinstance(value, property) else value
            if isinstance(value := getattr(value, "__func__", value), FunctionType):
                yield value


@lru_cache(maxsize=1024)  # the loss check asks several times about the same code
def _read_by(code: CodeType) -> frozenset[str]:
    read: set[str] = set()
    if "getattr" in code.co_names:
        read |= {each for each in code.co_consts if isinstance(each, str)}
    steps = list(dis.get_instructions(code))
    # `calls += 1`, `self.log["norm"] = value`do not use the earlier value
    written = {_start(one) for one in steps if _writes(one)}
    is_set: set[str] = set()
    for one in steps:
        if _start(one) in written and None not in _start(one):
            continue
        if one.opname in _STORES:
            is_set.add(one.argval)
        # from Python 3.12 on, an instruction with "NULL|" loads a method to call it
        elif one.opname in _LOADS and "NULL|" not in one.argrepr:
            read |= {one.argval} - is_set
    return frozenset(read)


def _writes(one: dis.Instruction) -> bool:
    return one.opname == "STORE_SUBSCR" or (one.opname == "BINARY_OP" and one.argrepr[-1] == "=")


def _start(one: dis.Instruction) -> tuple[int | None, int | None]:
    at = one.positions
    return (None, None) if at is None else (at.lineno, at.col_offset)
