"""`lockstep evaluate`: evaluates the weights of a run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any, TextIO

import click

from lockstep.base.foreign_text import show
from lockstep.checkpoint.saved_model import MODEL
from lockstep.cli.arguments import (
    ScriptCommand,
    launch_option,
    options_from,
    print_json,
    script_arguments,
    work_folder,
)
from lockstep.cli.export import export
from lockstep.cli.run_script import assignments, script_of
from lockstep.cli.target import Target
from lockstep.evaluation import EvaluateRequest
from lockstep.launch.environment import count_processes
from lockstep.logging.run_files import RESULT, RUN, is_there, numbered
from lockstep.recipe.parameters import saved_values
from lockstep.scripts.launch import count_gpus, launch_script
from lockstep.scripts.line import ScriptLine
from lockstep.scripts.process import never_trained

Metrics = dict[str, float | None]
"""Maps names of metrics to values. None stands for NaN."""


@click.command("evaluate", cls=ScriptCommand)
@launch_option("nproc")
@launch_option("plan")
@launch_option("share_devices")
@launch_option(
    "set", help="The value of a hyper-parameter, instead of the run's. Give it once for each."
)
@launch_option(
    "run_dir", help="Keep the run directory of the evaluation here. Default: a temporary one."
)
@click.option(
    "--best",
    is_flag=True,
    help="The weights of the best evaluation by ls.Saving(best=...), instead of the last ones.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the metrics as JSON. The output of SCRIPT then goes to stderr.",
)
@click.argument("source", metavar="RUN_DIR|CHECKPOINT|WEIGHTS")
@script_arguments(required=False)
def command(best: bool, as_json: bool, source: str, line: ScriptLine | None, **given: Any) -> int:
    """Measure the evaluations of SCRIPT's recipe on the weights of a run, without training.

    The weights come from a run directory, a checkpoint, a .safetensors file or a Hugging Face
    folder. A run directory gives its final model, or its newest checkpoint if the run has not
    ended. SCRIPT runs as in lockstep run, but its ls.train evaluates instead of training. The
    default for SCRIPT is the run's script with its arguments.

    \b
    Examples:
      lockstep evaluate runs/a
      lockstep evaluate --best --nproc 2 runs/a train.py --data other
      lockstep evaluate --json runs/a/model_average.safetensors train.py

    Exit status: 0, or the status of the process that failed first.
    """
    options = options_from(given)
    options.validate()
    run = None if _is_plain(Path(source)) else Target.find(source).run
    line = line or script_of(run, source, "evaluations come from a script's recipe")
    given["set"] = assignments({} if run is None else saved_values(run), options.set)
    with work_folder("lockstep-evaluate-") as folder:
        weights = Path(source) if _is_plain(Path(source)) else folder / MODEL
        if weights != Path(source):
            export(source, weights, best=best)
        run_dir = Path(options.run_dir or folder / "run")
        stdout = sys.stderr if as_json else None
        status, measured = measure(
            weights, line, given, folder=folder, run_dir=run_dir, stdout=stdout
        )
    if status == 0:
        _print(measured, as_json=as_json)
    return status


def measure(
    weights: Path,
    line: ScriptLine,
    given: Mapping[str, Any],
    *,
    folder: Path,
    run_dir: Path,
    stdout: TextIO | None,
) -> tuple[int, list[Metrics]]:
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
        raise never_trained(line, "a call of ls.train", "ls.train measures the weights")
    return status, [json.loads(result.read_text(encoding="utf-8"))["metrics"] for result in results]


def _is_plain(path: Path) -> bool:
    """Return True for a .safetensors file or a Hugging Face folder, False for a run directory or a
    checkpoint."""
    names = (MODEL, f"{MODEL}.index.json")
    return path.is_file() or (
        not is_there(path, RUN) and any((path / name).is_file() for name in names)
    )


def _print(measured: Sequence[Metrics], *, as_json: bool) -> None:
    if as_json:
        print_json(measured if len(measured) > 1 else measured[0])
        return
    for number, metrics in enumerate(measured, 1):
        if len(measured) > 1:
            show(f"by the recipe of the script's training {number}:")
        width = max(map(len, metrics))
        for name, value in metrics.items():
            show(f"{name:{width}}  {'nan' if value is None else f'{value:.6g}'}")
