"""Finds Python numbers that each call of the user's code changes, such as a counter of forwards.
Each rank calls the code for its own microbatches, so a counter of calls depends on the world
size."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import FunctionType
from typing import Any

from lockstep.base.attribute_reads import (
    functions_called,
    functions_of,
    names_read,
    names_read_by,
    names_read_by_all,
    names_read_by_dataset,
)
from lockstep.base.contents import attributes, is_users, variables_of

Numbers = Mapping[str, float]
_ITEMS = 16  # number of a list's items that are read


def numbers_of_model(model: Any) -> Numbers:
    """Return the Python numbers, by name, in attributes of the model's modules and in variables of
    their forwards."""
    found: dict[str, float] = {}
    of_objects: dict[str, float] = {}
    for prefix, module in model.named_modules():
        for name, value in _numbers_in(vars(module)):
            found[f"{prefix}.{name}".lstrip(".")] = value
        for name, value in _numbers_of_objects(vars(module)):
            of_objects[f"{prefix}.{name}".lstrip(".")] = value
    # the object's methods may keep a number for a log: only numbers that a forward reads count
    if of_objects:
        found |= {name: of_objects[name] for name in carried(model, of_objects)}
    for function in functions_of(model):
        if function is not None and is_users(function.__module__):
            found |= _numbers_around(function)
    return found


def carried(model: Any, names: Iterable[str]) -> list[str]:
    read = names_read(model)
    return sorted(name for name in names if _is_read(name, read))


def numbers_of_functions(functions: Iterable[Callable[..., Any]]) -> Numbers:
    found: dict[str, float] = {}
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        function = inspect.unwrap(function)
        owner = getattr(function, "__self__", function)
        call = inspect.getattr_static(owner, "__call__", None)  # None: only its method is called
        codes = [getattr(function, "__func__", function), call]
        codes = [each for each in codes if isinstance(each, FunctionType)]
        called = [each for code in codes for each in functions_called(type(owner), code)]
        if is_module := hasattr(owner, "named_modules"):
            called += functions_of(owner)
        numbers: dict[str, float] = {}
        for each in called:
            if each is not None and is_users(each.__module__):
                numbers |= _numbers_around(each)
        numbers |= numbers_of_model(owner) if is_module else dict(_numbers_in(attributes(owner)))
        read = names_read_by_all(called) if called else None
        found |= {name: value for name, value in numbers.items() if _is_read(name, read)}
    return found


def numbers_of_dataset(dataset: Any) -> Numbers:
    found: dict[str, float] = {}
    while dataset is not None:
        read = names_read_by_dataset(dataset)
        found |= {
            name: value for name, value in _numbers_in(attributes(dataset)) if _is_read(name, read)
        }
        dataset = attributes(dataset).get("dataset")
    return found


def changed_each_time(before: Numbers, between: Numbers, after: Numbers) -> list[str]:
    """Return the names of numbers that two consecutive calls both changed."""
    return [
        name
        for name, value in after.items()
        if name in between and before.get(name) != between[name] != value
    ]


def _numbers_in(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if _is_number(value):
            yield name, value
        elif type(value) in (dict, list):
            # items are named by their position, so a list to which calls append, a log, does not
            # count as changed
            items = value.items() if type(value) is dict else enumerate(value[:_ITEMS])
            yield from ((f"{name}[{each!r}]", item) for each, item in items if _is_number(item))


def _numbers_of_objects(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if is_users(type(value).__module__) and not hasattr(value, "named_modules"):
            for each, item in attributes(value).items():
                if _is_number(item):
                    yield f"{name}.{each}", item


def _numbers_around(function: FunctionType) -> dict[str, float]:
    around = variables_of(function)
    read = names_read_by(function)
    of_objects = _numbers_of_objects(around)
    used = {name: value for name, value in of_objects if name.rpartition(".")[2] in read}
    return {**dict(_numbers_in(around)), **used}


def _is_read(name: str, read: Set[str] | None) -> bool:
    return read is None or name.partition("[")[0].rpartition(".")[2] in read


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isnan(value)  # NaN is not equal to itself
