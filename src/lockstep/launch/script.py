"""Checks, before anything starts, that the script or module exists."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

from lockstep.base.errors import LaunchError


def check_script(script: str) -> None:
    """Raise `LaunchError` unless `script` is the path of a readable file."""
    if not os.path.exists(script):
        raise LaunchError(f"{script!r} is not there; SCRIPT is the path of a Python file; correct it, or give -m before a module's name")
    if not os.path.isfile(script):
        raise LaunchError(f"{script!r} is a directory; SCRIPT is the path of a Python file; name the file in it")
    if not os.access(script, os.R_OK):
        raise LaunchError(f"{script!r} cannot be read; SCRIPT is the path of a Python file; give yourself the right to read it")


def check_module(name: str) -> None:
    """Raise `LaunchError` if Python does not find the top package of the module from the working directory."""
    top = name.partition(".")[0]
    if top not in sys.builtin_module_names and PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise LaunchError(f"no module named {name!r}; -m takes the name of a module that Python can import from here; correct the name")
