"""Digests of a recipe's functions. A resumed run or a joining process compares the digests to find
edited code."""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import os
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from importlib.util import decode_source
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from lockstep.base.contents import CodeReader, Part, attributes, digest_parts, is_users
from lockstep.recipe.recipe import Recipe


@functools.cache
def texts() -> Mapping[str, str]:
    """Return the source of the script (as `__main__`) and of each module of the user."""
    by_name: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        # includes the script; in a process that was a spare, `__main__` is lockstep's own file
        if name == "__mp_main__":
            continue
        file = getattr(module, "__dict__", {}).get("__file__")
        if (
            isinstance(file, str)
            and is_users(name)
            and (lines := linecache.getlines(os.path.abspath(file)))
        ):
            by_name[name] = "".join(lines)
    return by_name


def sources() -> dict[str, str]:
    return {name: _digest(text) for name, text in texts().items()}


def programs(names: Iterable[str]) -> dict[str, str]:
    return {name: _program(texts()[name]) for name in names if name in texts()}


def note_source(file: str, source: bytes) -> None:
    """Make `texts` use `source` as the file's text. The user may edit the file while the script
    runs."""
    with suppress(SyntaxError, UnicodeDecodeError):
        text = decode_source(source)
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def _program(text: str) -> str:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # not Python, or another version's
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
"""Number of bytes above which only the beginning and the end of a tensor or array are read."""
_PARTS = 64

Digests = Mapping[str, Mapping[str, str]]
"""Maps a recipe's field and a name to the digest of the function's code, or of a value that the
function uses."""


class RecipeCode(NamedTuple):
    """Digests of a recipe's functions, to compare with a saved run's or another process's."""

    digests: Mapping[str, str]
    """Digests without the contents of objects that the functions use."""
    with_objects: Digests
    """Digests with the contents of objects that the functions use."""

    @classmethod
    def of(cls, recipe: Recipe) -> RecipeCode:
        functions = _functions(recipe).items()
        return cls(
            {name: digest_function(each) for name, each in functions}, code_and_objects_of(recipe)
        )


def code_and_objects_of(recipe: Recipe, unread: Collection[Any] = ()) -> Digests:
    """Digest each function of the recipe and the objects that it uses. Skips objects in
    `unread`."""
    ids = frozenset(map(id, unread))
    return {
        name: parts(function, objects=True, unread=ids)
        for name, function in _functions(recipe).items()
    }


def _functions(recipe: Recipe) -> dict[str, Any]:
    functions = {
        name: getattr(recipe, name) for name in FIELDS if getattr(recipe, name) is not None
    }
    if (batch_loss := recipe.batch_loss) is not None:
        functions["batch_loss"] = [batch_loss.collect, batch_loss.compute]
    if recipe.sequence is not None and recipe.sequence.documents is not None:
        functions["sequence"] = recipe.sequence.documents
    if recipe.balance is not None and recipe.balance.tokens is not None:
        functions["balance"] = recipe.balance.tokens
    return functions


def parts(
    function: Any, *, objects: bool = False, unread: frozenset[int] = frozenset()
) -> dict[str, str]:
    """Digest a function's code and the values that it uses. The digests ignore line numbers and
    docstrings. Trained parameters count only by dtype and shape. With `objects`, the contents of
    the user's objects are included."""
    return digest_parts(_RecipeReader(objects, unread).parts(function), _PARTS)[0]


def digest_function(function: Any) -> str:
    return _digest(repr(sorted(parts(function).items())))


class _RecipeReader(CodeReader):
    def __init__(self, objects: bool, unread: frozenset[int]) -> None:
        super().__init__(MOST_BYTES)
        self._objects = objects
        self._unread = unread

    def read(self, value: Any, path: str) -> Iterator[Part]:
        if id(value) in self._unread:
            yield from super().read(type(value), path)
        else:
            yield from super().read(value, path)

    def _used(self, function: FunctionType, name: str, content: Any) -> Iterator[Part]:
        if id(content) in self._unread:
            yield from self.read(content, name)
        else:
            yield from super()._used(function, name, content)

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
