"""Digests of the script and of the user's modules, by which processes find that their versions
differ."""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import decode_source

from lockstep.base.contents import is_users


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
