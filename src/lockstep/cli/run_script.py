"""The script of a run directory, with the arguments and hyper-parameters of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.base.errors import LaunchError
from lockstep.logging.run_files import read_metadata
from lockstep.recipe.parameters import saved_values, split_assignment
from lockstep.scripts.line import ScriptLine

OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of the `python` command whose value is the next word."""


def script_of(run: Path | None, source: str, needs: str) -> ScriptLine:
    """Return the command line of the script that made a run. Raises `LaunchError` if the script is
    unknown. `run`: the run directory; None if `source`, the user's text, names none. `needs`: text
    that says what needs the script."""
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
    """Return the words of a command line of `python` without the interpreter's own options, so that
    they begin with the script, or with `-m` and a module.

    >>> without_options(["-u", "-X", "dev", "-m", "package.train", "-u"])
    ['-m', 'package.train', '-u']
    """
    place = 0
    while words[place : place + 1] and words[place][:1] == "-" and words[place] not in ("-m", "-c"):
        place += 1 + (words[place] in OPTIONS_WITH_VALUE)
    return words[place:]


def assignments(run: Path | None, given: Sequence[str]) -> tuple[str, ...]:
    """Return the values of hyper-parameters in the form NAME=VALUE of `--set`: those of the run,
    and those in `given`, which take precedence."""
    values = {} if run is None else saved_values(run)
    texts = {name: str(value) for name, value in values.items()} | dict(
        map(split_assignment, given)
    )
    return tuple(f"{name}={text}" for name, text in texts.items())
