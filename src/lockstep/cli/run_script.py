"""Reconstructs the command line of the script that made a run directory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.base.errors import LaunchError
from lockstep.logging.run_files import read_metadata
from lockstep.recipe.parameters import split_assignment
from lockstep.scripts.line import ScriptLine

OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def script_of(run: Path | None, source: str, needs: str) -> ScriptLine:
    metadata = {} if run is None else read_metadata(run)
    environment = metadata.get("environment") or {}
    line = [str(word) for word in environment.get("command_line") or []]
    words = (
        line[line.index("lockstep.launch.worker") + 1 :]
        if "lockstep.launch.worker" in line
        else without_options(line[1:])
    )
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if metadata.get("launcher") == "spawn":
        raise LaunchError(
            f"{source} was made by ls.spawn, which starts processes of its own; {needs}; give a"
            " SCRIPT that calls the function itself"
        )
    if words and words[0].endswith("kernel_launcher"):
        raise LaunchError(
            f"{source} was made in a notebook; {needs}; give a SCRIPT with the same training"
        )
    if not words or words[0].startswith("-"):
        raise LaunchError(f"{source} does not name its script; {needs}; give SCRIPT")
    script = words[0]
    if not is_module:
        script = os.path.join(environment.get("working_directory") or "", script)
    made_by = ScriptLine(script, words[1:], is_module)
    made_by.check()
    return made_by


def without_options(words: Sequence[str]) -> Sequence[str]:
    """Return a command line of `python` without the options of the interpreter. The first word is
    the script or `-m`.

    >>> without_options(["-u", "-X", "dev", "-m", "package.train", "-u"])
    ['-m', 'package.train', '-u']
    """
    place = 0
    while words[place : place + 1] and words[place][:1] == "-" and words[place] not in ("-m", "-c"):
        place += 1 + (words[place] in OPTIONS_WITH_VALUE)
    return words[place:]


def assignments(values: Mapping[str, Any], given: Sequence[str] = ()) -> tuple[str, ...]:
    """Return NAME=VALUE for each of `values`. A value in `given` takes precedence."""
    texts = {name: str(value) for name, value in values.items()} | dict(
        map(split_assignment, given)
    )
    return tuple(f"{name}={text}" for name, text in texts.items())
