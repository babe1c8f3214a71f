"""Reads the command line of a script. Checks that the script exists, and finds a command's options
among its arguments. Does not import torch."""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import takewhile
from pathlib import Path

from lockstep.base.errors import LaunchError
from lockstep.base.system import shell_words


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """A script and its arguments, as `[-m] SCRIPT ARGS...`."""

    script: str
    """The path of a Python file, or the name of a module."""
    arguments: Sequence[str] = ()
    is_module: bool = False

    def check(self) -> None:
        (_check_module if self.is_module else check_script)(self.script)

    @classmethod
    def parse(cls, text: str, option: str) -> ScriptLine:
        """Parse a path, or a script with arguments in shell syntax."""
        words = [text] if Path(text).is_file() else shell_words(option, text)
        is_module = words[:1] == ["-m"]
        if len(words) <= is_module:
            raise LaunchError(
                f"{option} {text!r} names no script; it must be the path of a Python file, and its"
                " arguments; give one"
            )
        line = cls(words[is_module], words[is_module + 1 :], is_module)
        line.check()
        return line

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def words(self) -> list[str]:
        return [*(["-m"] if self.is_module else []), self.script, *self.arguments]

    @property
    def name(self) -> str:
        return self.script if self.is_module else Path(self.script).stem


def check_script(script: str) -> None:
    if not os.path.exists(script):
        what, remedy = "is not there", "correct it, or give -m before a module's name"
    elif not os.path.isfile(script):
        what, remedy = "is a directory", "name the file in it"
    elif not os.access(script, os.R_OK):
        what, remedy = "cannot be read", "give yourself the right to read it"
    else:
        return
    raise LaunchError(f"{script!r} {what}; SCRIPT is the path of a Python file; {remedy}")


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    if (
        top not in sys.builtin_module_names
        and PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None
    ):
        raise LaunchError(
            f"no module named {name!r}; -m takes the name of a module that Python can import from"
            " here; correct the name"
        )


def misplaced(
    options: Iterable[str], arguments: Sequence[str], script: str, *, imports: str | None = None
) -> list[str]:
    """Return the `options` of the command that are among the script's arguments (before any `--`)
    and that the script does not mention. Returns an empty list if the script does not import the
    package `imports`, because such a script may pass its arguments on."""
    own = takewhile(lambda argument: argument != "--", arguments)
    names = {argument.partition("=")[0] for argument in own if argument[:2] == "--"} & set(options)
    if not names:
        return []
    try:
        nodes = list(ast.walk(ast.parse(Path(script).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return []
    if imports is not None and imports not in _packages_of(nodes):
        return []
    words = _words_of(nodes)
    return sorted(name for name in names if name.lstrip("-").replace("-", "_") not in words)


def _packages_of(nodes: Sequence[ast.AST]) -> set[str]:
    imported = [
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    ]
    imported += [
        node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level
    ]
    return {name.partition(".")[0] for name in imported}


def _words_of(nodes: Sequence[ast.AST]) -> set[str]:
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [
        value
        for node in nodes
        if id(node) not in docstrings
        for _, value in ast.iter_fields(node)
        if isinstance(value, str)
    ]
    return {
        word.strip("_") for text in texts for word in re.findall(r"\w+", text.replace("-", "_"))
    }
