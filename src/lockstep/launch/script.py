"""Checks, before anything starts, that the script or module exists."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from itertools import takewhile
from pathlib import Path

from lockstep.base.errors import LaunchError


def check_script(script: str) -> None:
    """Raise `LaunchError` unless `script` is the path of a readable file."""
    if not os.path.exists(script):
        raise LaunchError(
            f"{script!r} is not there; SCRIPT is the path of a Python file; correct it, or give -m"
            " before a module's name"
        )
    if not os.path.isfile(script):
        raise LaunchError(
            f"{script!r} is a directory; SCRIPT is the path of a Python file; name the file in it"
        )
    if not os.access(script, os.R_OK):
        raise LaunchError(
            f"{script!r} cannot be read; SCRIPT is the path of a Python file; give yourself the"
            " right to read it"
        )


def misplaced(
    options: Iterable[str], arguments: Sequence[str], script: str, *, imports: str | None = None
) -> list[str]:
    """Return the `options` of a command among a script's arguments, before any `--`, that the code
    of the file `script` does not mention. `imports`: a package; a script that does not import it
    hands its arguments on, and none is returned."""
    given = {
        argument.partition("=")[0]
        for argument in takewhile(lambda argument: argument != "--", arguments)
        if argument[:2] == "--"
    }
    names = given & set(options)
    if not names:
        return []
    try:
        code = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    if imports is not None and imports not in _packages_of(code):
        return []
    words = _words_of(code)
    return sorted(name for name in names if name.lstrip("-").replace("-", "_") not in words)


def _packages_of(code: ast.Module) -> set[str]:
    """Return the packages that the code imports from."""
    imported = [
        alias.name
        for node in ast.walk(code)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    imported += [
        node.module or ""
        for node in ast.walk(code)
        if isinstance(node, ast.ImportFrom) and not node.level
    ]
    return {name.partition(".")[0] for name in imported}


def _words_of(code: ast.Module) -> set[str]:
    """Return the words in names and strings, but not in docstrings, with `_` for `-`."""
    docstrings = {id(node.value) for node in ast.walk(code) if isinstance(node, ast.Expr)}
    words: set[str] = set()
    for node in ast.walk(code):
        texts = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
        if id(node) not in docstrings:
            words.update(
                word.strip("_")
                for text in texts
                for word in re.findall(r"\w+", text.replace("-", "_"))
            )
    return words


def check_module(name: str) -> None:
    """Raise `LaunchError` if Python does not find the top package of the module from the working
    directory."""
    top = name.partition(".")[0]
    if (
        top not in sys.builtin_module_names
        and PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None
    ):
        raise LaunchError(
            f"no module named {name!r}; -m takes the name of a module that Python can import from"
            " here; correct the name"
        )
