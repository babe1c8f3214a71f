"""Evaluations of a script's recipe on given weights: its `ls.train` evaluates instead of
training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from itertools import count, takewhile
from pathlib import Path
from typing import Any, TextIO

from lockstep.cli.arguments.launch import options_from
from lockstep.launch.count import count_processes
from lockstep.logging.run_files import RESULT, numbered
from lockstep.scripts.launch import count_gpus, launch_script
from lockstep.scripts.line import ScriptLine
from lockstep.scripts.process import never_trained

Metrics = dict[str, float | None]
"""Metrics by name; None for NaN."""


def measure(
    weights: Path,
    line: ScriptLine,
    given: Mapping[str, Any],
    *,
    folder: Path,
    run_dir: Path,
    stdout: TextIO | None,
) -> tuple[int, list[Metrics]]:
    """Return the exit status and, if it is 0, the metrics of each training of the script. `given`:
    launch options by name. `folder`: for temporary files. `stdout`: the workers'; None: this
    process's. Raises `LaunchError` if the script has not evaluated.
    """
    from lockstep.evaluation import EvaluateRequest  # imports torch

    options = options_from({**given, "run_dir": str(run_dir)})
    processes = count_processes(options.nproc, options.validate(), count_gpus, name="--nproc ")
    status = launch_script(
        line,
        options,
        count=processes,
        began=time.time(),
        request=EvaluateRequest(weights=os.path.abspath(weights)).write(folder),
        stdout=stdout,
    )
    if status != 0:
        return status, []
    numbers = (numbered(run_dir, number) / RESULT for number in count(1))
    results = list(takewhile(Path.is_file, numbers))
    if not results:
        raise never_trained(line, "a call of ls.train", "that is what measures the weights")
    return status, [json.loads(result.read_text(encoding="utf-8"))["metrics"] for result in results]
