"""Digests of the code of a recipe's functions, by which a resumed run finds out that one was edited. Needs no torch."""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, MethodType
from typing import Any

from lockstep.recipe.recipe import Recipe

FIELDS = ("model", "loss", "optimizer", "inputs", "weight", "collate", "schedule", "sampler", "batch_sampler")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def code_of(recipe: Recipe) -> dict[str, str]:
    """Return the digest of each function of the recipe. They differ between versions of Python."""
    found = {name: digest(getattr(recipe, name)) for name in FIELDS if getattr(recipe, name) is not None}
    batch_loss = recipe.batch_loss
    return found if batch_loss is None else {**found, "batch_loss": digest([batch_loss.collect, batch_loss.compute])}


def digest(function: Any) -> str:
    """Return the digest of a function's bytecode, its defaults, the plain values that it closes over or reads from its
    module, and likewise of the user's functions and classes that it uses. Line numbers and docstrings do not count. A
    library's function counts by its name and the plain values that it closes over."""
    found = hashlib.blake2b(digest_size=8)
    for part in _parts(function, set()):
        found.update(part.encode(errors="surrogatepass") + b"\0")
    return found.hexdigest()


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, list | tuple):
        yield type(value).__name__
        for part in value:
            yield from _parts(part, seen)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield repr(name)
            yield from _parts(part, seen)
    elif id(value) in seen:
        yield "again"
    else:
        seen.add(id(value))
        yield from _parts_of_object(value, seen)


def _parts_of_object(value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(value, functools.partial):
        yield from _parts([value.func, list(value.args), value.keywords], seen)
    elif isinstance(value, MethodType):
        yield from _parts(value.__func__, seen)
    elif isinstance(value, FunctionType):
        yield from _function(value, seen)
    elif isinstance(value, type):
        yield value.__qualname__
        if _is_users(value.__module__):
            yield from _parts([_unhooked(part) for part in vars(value).values() if isinstance(part, FunctionType)], seen)
            yield from _parts(value.__bases__, seen)
    else:
        yield from _parts(type(value), seen)


def _unhooked(function: FunctionType) -> FunctionType:
    """Return the `step` that an optimizer's class defines; torch wraps it when the first one is made."""
    return function.__wrapped__ if getattr(function, "hooked", False) else function  # type: ignore[attr-defined]


def _function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    if not _is_users(function.__module__):
        yield f"{function.__module__}.{function.__qualname__}"
        for name, content in _closed_over(function):
            if _is_plain(content):  # the arguments of what made it: `warmup_cosine(warmup=5, total=1000)`
                yield name
                yield from _parts(content, seen)
        return
    yield from _code(function.__code__)
    yield from _parts([list(function.__defaults__ or ()), function.__kwdefaults__ or {}], seen)
    for name, content in _closed_over(function):
        yield name
        yield from _parts(content, seen)
    for name in sorted(set(_names(function.__code__)) & function.__globals__.keys()):
        found = function.__globals__[name]
        if isinstance(found, (*_PLAIN, FunctionType, type)):
            yield name
            yield from _parts(found, seen)


def _closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each variable of an enclosing function that is set."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not yet set
            yield name, cell.cell_contents


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)


def _code(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        yield instruction.opname
        if isinstance(value, CodeType):
            yield from _code(value)
        else:
            yield repr(sorted(map(repr, value))) if isinstance(value, frozenset) else f"{type(value).__name__} {value!r}"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@functools.cache
def _is_users(module: str | None) -> bool:
    """True unless the module is Python's, installed, or lockstep's."""
    if module in ("__main__", "__mp_main__"):
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if file is None or (module or "").partition(".")[0] == "lockstep":
        return False
    return "site-packages" not in file and "dist-packages" not in file and not file.startswith(sysconfig.get_path("stdlib"))
