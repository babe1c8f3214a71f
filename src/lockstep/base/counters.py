"""Finds numbers that each call of the user's code changes, such as a counter of forwards. Each rank
makes different calls, so a model that uses such a number learns something that depends on the
number of ranks."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from lockstep.base.attribute_reads import attributes_read
from lockstep.base.contents import attributes, variables_of

Numbers = Mapping[str, float]


def numbers_of_model(model: Any) -> Numbers:
    """Return the numbers in attributes of the model's modules, by name."""
    return {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, module in model.named_modules()
        for name, value in _numbers_in(vars(module))
    }


def carried(model: Any, names: Iterable[str]) -> list[str]:
    """Return the model's numbers whose earlier value a forward may use. Others are set anew by each
    forward, for a log."""
    read = attributes_read(model)
    return sorted(
        name for name in names if read is None or name.partition("[")[0].rpartition(".")[2] in read
    )


def numbers_of_functions(functions: Iterable[Callable[..., Any]]) -> Numbers:
    """Return the numbers that functions, or objects that are called, use: in attributes, and in
    variables of a closure or a module."""
    found: dict[str, float] = {}
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        function = inspect.unwrap(function)
        owner = getattr(function, "__self__", function)
        if hasattr(owner, "named_modules"):
            found |= numbers_of_model(owner)
        else:
            found |= dict(_numbers_in(attributes(owner)))
        if isinstance(code := getattr(function, "__func__", function), FunctionType):
            found |= dict(_numbers_in(variables_of(code)))
    return found


def numbers_of_dataset(dataset: Any) -> Numbers:
    """Return the numbers in the attributes of the dataset and, for wrappers such as `Subset`, of
    the dataset inside it."""
    found: dict[str, float] = {}
    while dataset is not None:
        found |= dict(_numbers_in(attributes(dataset)))
        dataset = attributes(dataset).get("dataset")
    return found


def changed_each_time(before: Numbers, between: Numbers, after: Numbers) -> list[str]:
    """Return the names of numbers that two calls have both changed."""
    return [
        name
        for name, value in after.items()
        if name in before and name in between and before[name] != between[name] != value
    ]


def _numbers_in(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if type(value) is dict:
            yield from (
                (f"{name}[{each!r}]", item) for each, item in value.items() if _is_number(item)
            )
        elif _is_number(value):
            yield name, value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isnan(value)  # NaN is not equal to itself
