"""Checks, before anything starts, that the script or module exists."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from lockstep.base.errors import LaunchError


def check_script(script: str) -> None:
    """Raise `LaunchError` unless `script` is the path of a readable file."""
    if not os.path.exists(script):
        raise LaunchError(f"{script!r} is not there; SCRIPT is the path of a Python file; correct it, or give -m before a module's name")
    if not os.path.isfile(script):
        raise LaunchError(f"{script!r} is a directory; SCRIPT is the path of a Python file; name the file in it")
    if not os.access(script, os.R_OK):
        raise LaunchError(f"{script!r} cannot be read; SCRIPT is the path of a Python file; give yourself the right to read it")


def misplaced(options: Iterable[str], arguments: Sequence[str], script: str) -> list[str]:
    """Return the `options` of the launcher among a script's arguments that the file `script` does not mention. Empty if
    it does not use lockstep: it may hand its arguments on."""
    names = {argument.partition("=")[0] for argument in arguments} & set(options)
    text = Path(script).read_text(encoding="utf-8", errors="replace").replace("_", "-") if names else ""
    if re.search(r"^\s*(import|from) lockstep\b", text, re.MULTILINE) is None:
        return []
    return sorted(name for name in names if re.search(rf"\b{name.removeprefix('--')}\b", text) is None)


def check_module(name: str) -> None:
    """Raise `LaunchError` if Python does not find the top package of the module from the working directory."""
    top = name.partition(".")[0]
    if top not in sys.builtin_module_names and PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise LaunchError(f"no module named {name!r}; -m takes the name of a module that Python can import from here; correct the name")
