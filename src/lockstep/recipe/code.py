"""Digests of a recipe's functions, by which a resumed run and joining processes find an edit. Needs
no torch."""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from importlib.util import decode_source
from types import SimpleNamespace
from typing import Any

from lockstep.base.contents import CodeReader, Part, attributes, digest_parts, is_users
from lockstep.recipe.recipe import Recipe


@functools.cache
def texts() -> Mapping[str, str]:
    """Return the source of the script, as `__main__`, and of the user's loaded modules, as they are
    at the first call."""
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if name == "__mp_main__":  # the script too; in a process that was a spare, lockstep's own
            continue
        file = getattr(module, "__dict__", {}).get("__file__")
        if (
            isinstance(file, str)
            and is_users(name)
            and (lines := linecache.getlines(os.path.abspath(file)))
        ):
            found[name] = "".join(lines)
    return found


def sources() -> dict[str, str]:
    return {name: _digest(text) for name, text in texts().items()}


def programs(names: Iterable[str]) -> dict[str, str]:
    """Return these modules' digests without comments, docstrings and line numbers, which takes a
    parse."""
    return {name: _program(texts()[name]) for name in names if name in texts()}


def note_source(file: str, source: bytes) -> None:
    """Let `texts` take this as the file's text: the script may be edited while it runs."""
    with suppress(SyntaxError, UnicodeDecodeError):
        text = decode_source(source)
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def _program(text: str) -> str:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # not Python, or that of another version
        return _digest(text)
    for node in ast.walk(tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:]
    return _digest(ast.dump(tree))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def other_sources(one: Mapping[str, str], another: Mapping[str, str]) -> list[str]:
    """Return the modules that differ."""
    return [name for name, digest in one.items() if another.get(name, digest) != digest]


FIELDS = (
    "model",
    "loss",
    "optimizer",
    "inputs",
    "weight",
    "collate",
    "schedule",
    "sampler",
    "batch_sampler",
)
MOST_BYTES = 2**26
"""A larger tensor or array is read at both ends."""
_PARTS = 64

Digests = Mapping[str, Mapping[str, str]]
"""Field of the recipe -> digests of the function's code and of the values that it uses, by name."""


def code_of(recipe: Recipe) -> dict[str, str]:
    """Return one digest of each function, whatever is in objects that it passes on, such as the
    script's arguments. They differ between versions of Python."""
    return {name: digest(function) for name, function in _functions(recipe).items()}


def code_and_objects_of(recipe: Recipe) -> Digests:
    """Return the digests of each function, with the contents of objects that it uses."""
    return {name: parts(function, objects=True) for name, function in _functions(recipe).items()}


def _functions(recipe: Recipe) -> dict[str, Any]:
    found = {name: getattr(recipe, name) for name in FIELDS if getattr(recipe, name) is not None}
    if (batch_loss := recipe.batch_loss) is not None:
        found["batch_loss"] = [batch_loss.collect, batch_loss.compute]
    if recipe.sequence is not None and recipe.sequence.documents is not None:
        found["sequence"] = recipe.sequence.documents
    return found


def parts(function: Any, *, objects: bool = False) -> dict[str, str]:
    """Return the digests of a function's code, of what it closes over, has as defaults or reads
    from its module, and of the user's functions and classes that it uses. Line numbers and
    docstrings do not count; of trained parameters, dtype and shape do. `objects`: the contents of
    users' objects, dataclasses and namespaces count too."""
    return digest_parts(_RecipeReader(objects).parts(function), _PARTS)[0]


def digest(function: Any) -> str:
    return hashlib.blake2b(
        repr(sorted(parts(function).items())).encode(), digest_size=8
    ).hexdigest()


class _RecipeReader(CodeReader):
    def __init__(self, objects: bool) -> None:
        super().__init__(MOST_BYTES)
        self._objects = objects

    def _object(self, value: Any, path: str) -> Iterator[Part]:
        yield from self.read(type(value), path)
        own, is_users_own = attributes(value), is_users(type(value).__module__)
        if isinstance(value, _module_class()):
            own = {
                name: part for name, part in own.items() if not name.startswith("_")
            } | _parts_of_module(value)
        elif not self._objects or not (
            is_users_own or is_dataclass(value) or isinstance(value, Namespace | SimpleNamespace)
        ):
            own = {}
        for name, part in own.items():
            yield from self.read(part, f"{path}.{name}")

    def _tensor(self, value: Any, path: str) -> Iterator[Part]:
        if value.requires_grad:
            yield path, [f"{value.dtype} {tuple(value.shape)}".encode()]
        else:
            yield from super()._tensor(value, path)


def _parts_of_module(module: Any) -> dict[str, Any]:
    """Return a module's own parameters, buffers and modules by name."""
    modules = {
        name: each
        for name, each in module.named_modules(remove_duplicate=False)
        if name and "." not in name
    }
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return {
        **dict(parameters),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
        **modules,
    }


def _module_class() -> type | tuple[()]:
    torch = sys.modules.get("torch")
    return () if torch is None else torch.nn.Module
