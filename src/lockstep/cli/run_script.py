"""The script of a run directory, with the arguments and hyper-parameters of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.base.errors import LaunchError
from lockstep.logging.run_files import read_metadata
from lockstep.recipe.parameters import saved_values, split_assignment
from lockstep.scripts.line import ScriptLine


def script_of(run: Path | None, source: str, needs: str) -> ScriptLine:
    """Return the command line of the script that made a run. Raises `LaunchError` if it is not
    known. `run`: the run directory; None if `source`, as the user gave it, is none. `needs`: text
    for what needs the script."""
    environment = {} if run is None else read_metadata(run).get("environment") or {}
    line = [str(word) for word in environment.get("command_line") or []]
    words = (
        line[line.index("lockstep.launch.worker") + 1 :]
        if "lockstep.launch.worker" in line
        else line[1:]
    )
    if not words or words[0].startswith("-"):
        raise LaunchError(f"{source} does not name its script; {needs}; give SCRIPT")
    script = os.path.join(environment.get("working_directory") or "", words[0])
    made_by = ScriptLine(script, words[1:])
    made_by.check()
    return made_by


def assignments(run: Path | None, given: Sequence[str]) -> tuple[str, ...]:
    """Return the values of hyper-parameters for `--set`: the run's, replaced by `given` ones."""
    values = {} if run is None else saved_values(run)
    texts = {name: str(value) for name, value in values.items()} | dict(
        map(split_assignment, given)
    )
    return tuple(f"{name}={text}" for name, text in texts.items())
