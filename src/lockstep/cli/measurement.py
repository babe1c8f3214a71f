"""Evaluations of a script's recipe on given weights: the script is run, and its `ls.train`
evaluates."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any, TextIO

from lockstep.base.errors import LaunchError
from lockstep.cli.arguments.launch import check_target, options_from
from lockstep.cli.run import count_gpus, run
from lockstep.launch.count import count_processes
from lockstep.logging.run_files import RESULT
from lockstep.logging.run_path import numbered

Metrics = dict[str, float | None]
"""Metrics by name; None for NaN."""


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """A script that makes a recipe, and its arguments."""

    script: Sequence[str]
    """`[-m] SCRIPT`."""
    arguments: Sequence[str] = ()

    @classmethod
    def parse(cls, text: str, option: str) -> ScriptLine:
        """Read the value of an option: a path, or what a shell reads as script and arguments.
        Raises `LaunchError`."""
        try:
            words = [text] if Path(text).is_file() else shlex.split(text)
        except ValueError as error:
            raise LaunchError(
                f"{option} {text!r}: {error}; it is read as a shell reads it; close each quotation"
                " mark"
            ) from error
        own = 2 if words[:1] == ["-m"] else 1
        if len(words) < own:
            raise LaunchError(
                f"{option} {text!r} names no script; it is the path of a Python file, and its"
                " arguments; give one"
            )
        check_target(words[own - 1], is_module=own == 2)
        return cls(words[:own], words[own:])


def measure(
    weights: Path,
    line: ScriptLine,
    given: Mapping[str, Any],
    *,
    run_dir: Path,
    began: float,
    stdout: TextIO | None,
) -> tuple[int, list[Metrics]]:
    """Return the exit status, and if that is 0, the metrics of each training of the script.

    `given`: launch options by name. `began`: a Unix time. `stdout`: that of the workers; None: this
    process's. Raises `LaunchError` if the script has not evaluated.
    """
    options = options_from({**given, "run_dir": str(run_dir), "evaluate": os.path.abspath(weights)})
    processes = count_processes(options.nproc, options.validate(), count_gpus, name="--nproc ")
    status = run(
        line.script,
        line.arguments,
        options,
        count=processes,
        machines=None,
        began=began,
        stdout=stdout,
    )
    if status != 0:
        return status, []
    results = list(
        takewhile(Path.is_file, (numbered(run_dir, number) / RESULT for number in count(1)))
    )
    if not results:
        raise LaunchError(
            f"{line.script[-1]} ended without an evaluation; ls.train makes it instead of training;"
            " call it in the script"
        )
    return status, [json.loads(result.read_text(encoding="utf-8"))["metrics"] for result in results]
