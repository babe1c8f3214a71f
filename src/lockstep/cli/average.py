"""`lockstep average`: averages the weights of several runs."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from lockstep.base.errors import CheckpointError, DataError, LaunchError, say
from lockstep.base.foreign_text import show
from lockstep.base.interrupt import interrupts_end
from lockstep.checkpoint.averaging import (
    COUNTER,
    AverageMember,
    WeightAverage,
    check_alike,
    greedy_soup,
    normalised,
)
from lockstep.checkpoint.manifest import DamagedError
from lockstep.checkpoint.saved_model import MODEL, StateDictReader, read_safetensors
from lockstep.cli.arguments import json_option, launch_option, mode_option, model_option, print_json
from lockstep.cli.evaluate import Metrics, measure
from lockstep.cli.export import check_out, final_model, saved_model, write_model
from lockstep.cli.run_script import assignments
from lockstep.cli.target import Target, checkpoint_readable
from lockstep.logging.run_files import RUN
from lockstep.recipe.parameters import saved_values
from lockstep.scripts.line import ScriptLine
from lockstep.scripts.process import ended_by_signals
from lockstep.search.request import direction_of
from lockstep.search.summary import aligned_lines

METADATA = "lockstep.average"
"""Key in the metadata of the output file: its value is JSON with each run and its weight."""
Mode = Literal["min", "max"]


@dataclass(slots=True)
class _AveragedRun:
    member: AverageMember
    what: str
    file: Path | None
    parameters: dict[str, Any]
    metrics: Metrics | None = None

    @property
    def name(self) -> str:
        return self.member.name


@click.command("average")
@click.option(
    "-o", "--output", "out", required=True, metavar="OUT.safetensors", help="The file to write."
)
@click.option(
    "--weights",
    metavar="W,W,...",
    help="The weight of each run, relative to the others. Default: equal.",
)
@click.option(
    "--evaluate",
    "line",
    metavar="SCRIPT",
    help="Evaluate each run and the average by its recipe; a text with its arguments.",
)
@click.option(
    "--greedy",
    is_flag=True,
    help="Keep only runs that improve the average, by --evaluate and --metric.",
)
@click.option("--metric", default="loss", show_default=True, help="The metric of --greedy.")
@mode_option
@launch_option("nproc")
@launch_option("plan")
@launch_option("share_devices")
@launch_option(
    "set",
    help=(
        "The value of a hyper-parameter in evaluations, instead of the runs'. Give it once for"
        " each."
    ),
)
@model_option
@json_option
@click.argument("sources", nargs=-1, required=True, metavar="RUN...")
def command(
    sources: tuple[str, ...], out: str, as_json: bool, module: int | None, **given: Any
) -> int:
    """Average the weights of several runs of one model into one file: a model soup.

    RUN is a run directory (its final model is used), a checkpoint, or a .safetensors file.
    Floating-point tensors are averaged in float64; other tensors are taken from the first run.
    Recompute BatchNorm's running statistics before you use the file. Runs from the same pretrained
    weights average well; runs from different random weights do not.

    --greedy starts with the best run, and adds each other run, from better to worse, that improves
    the average (Wortsman et al., 2022). The output of SCRIPT goes to stderr.

    \b
    Examples:
      lockstep average runs/a runs/b runs/c -o soup.safetensors
      lockstep average runs/a runs/b -o soup.safetensors --weights 0.7,0.3
      lockstep average runs/a runs/b -o soup.safetensors --evaluate "train.py --data test" --nproc 2
      lockstep average runs/a runs/b -o soup.safetensors --evaluate train.py --greedy --metric loss

    Exit status: 0, or the status of the evaluation that failed.
    """
    path = Path(out)
    parts = _checked(click.get_current_context(), sources, path)
    line = None if given["line"] is None else ScriptLine.parse(given["line"], "--evaluate")
    mode: Mode = "min" if direction_of(given["metric"], given["mode"]) == "minimize" else "max"
    runs = [_opened(source, module, part) for source, part in zip(sources, parts, strict=True)]
    for other in runs[1:]:
        _check_alike(runs[0], other)
    with interrupts_end():
        import torch  # noqa: F401
    metrics = None
    if line is not None:
        # next to the output, because a model may be too large for /tmp
        parent, prefix = path.absolute().parent, f".{path.stem}-"
        with ended_by_signals(), tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
            evaluations = _Evaluations(line, _launch_options(runs, given), Path(folder))
            for run in runs:
                run.metrics = evaluations.measure(run.name, run.member.model, run.file)
            if given["greedy"]:
                metrics = evaluations.greedy(runs, given["metric"], mode)
            else:
                metrics = evaluations.measure_average(runs)
    _write(runs, metrics, path, as_json=as_json)
    return 0


def _checked(context: click.Context, sources: Sequence[str], path: Path) -> list[float]:
    given = context.params
    needs = dict.fromkeys(("greedy", "nproc", "plan", "share_devices", "set"), "line")
    needs |= dict.fromkeys(("metric", "mode"), "greedy")
    for name, needed in needs.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE and not given[needed]:
            flag = "--evaluate SCRIPT" if needed == "line" else "--greedy"
            option = f"--{name.replace('_', '-')}"
            raise LaunchError(
                f"{option} without {flag} has no effect; give both, or leave {option} out"
            )
    if len(sources) < 2:
        raise LaunchError(
            f"an average of one run, {sources[0]}; it needs two or more; give others, or use"
            " lockstep export for one"
        )
    places = [Path(os.path.realpath(source)) for source in sources]
    for source, place in zip(sources, places, strict=True):
        if "://" not in source and places.count(place) > 1:
            raise LaunchError(
                f"{source} is given twice; a run can be in an average once; leave one out, or"
                " raise its weight by --weights"
            )
    check_out(path)
    if given["weights"] is None:
        return normalised([1.0] * len(sources))
    if given["greedy"]:
        raise LaunchError(
            "--weights with --greedy; a greedy soup has equal parts; leave one of the two out"
        )
    return normalised(_numbers(given["weights"], len(sources)))


def _numbers(text: str, runs: int) -> list[float]:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError as error:
        raise LaunchError(
            f"--weights {text!r}: {error}; it takes numbers with commas between them, such as"
            " 0.5,0.3,0.2"
        ) from error
    if len(numbers) != runs:
        raise LaunchError(
            f"--weights {text} has {len(numbers)} numbers for {runs} runs; it needs one for each"
            f" run, in the order of the runs; give {runs}"
        )
    return numbers


def _opened(source: str, module: int | None, part: float) -> _AveragedRun:
    with checkpoint_readable(source):
        model, what, file = _weights(source, module)
    places = (Path(source), *Path(source).absolute().parents[:2])
    folder = next((place for place in places if (place / RUN).is_file()), None)
    return _AveragedRun(
        AverageMember(source, model, part),
        what,
        file,
        {} if folder is None else saved_values(folder),
    )


def _weights(source: str, module: int | None) -> tuple[StateDictReader, str, Path | None]:
    path = Path(source)
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(
                f"{source} is not a .safetensors file; no other file is read, because a pickle"
                " runs code; give the run's folder"
            )
        try:
            return read_safetensors(path), "file", path
        except DamagedError as error:
            raise CheckpointError(f"{source} cannot be read: {error}; fetch it again") from error
    at = Target.find(source)
    if at.run is None:
        return *saved_model(at, module), None
    found = final_model(at, module)
    if found is None:
        remedy = "leave it out"
        if at.names:
            newest = at.run / "checkpoints" / str(at.names[-1])
            remedy = f"give its newest checkpoint, {newest}"
        raise CheckpointError(
            f"{source} has no final model, which ls.train writes at its end; only trained models"
            f" are averaged; {remedy}"
        )
    return *found, at.run / MODEL


def _check_alike(first: _AveragedRun, other: _AveragedRun) -> None:
    try:
        check_alike(first.member, other.member)
    except CheckpointError as error:
        one, two = first.parameters, other.parameters
        names = [name for name in one | two if one.get(name) != two.get(name)]
        if not names:
            raise
        started = [
            f"{run.name} was started with "
            + ", ".join(f"{name}={run.parameters.get(name)}" for name in names)
            for run in (first, other)
        ]
        raise CheckpointError(f"{error} ({' and '.join(started)})") from None


def _launch_options(runs: Sequence[_AveragedRun], given: Mapping[str, Any]) -> dict[str, Any]:
    """Set the hyper-parameters to the values of `--set`, or to the values that all runs share."""
    first = runs[0].parameters
    shared = {
        name: value
        for name, value in first.items()
        if all(run.parameters.get(name) == value for run in runs)
    }
    options = {name: given[name] for name in ("nproc", "plan", "share_devices")}
    return {**options, "set": assignments(shared, given["set"] or ())}


@dataclass(slots=True)
class _Evaluations:
    line: ScriptLine
    options: Mapping[str, Any]
    folder: Path
    count: int = 0

    def greedy(self, runs: Sequence[_AveragedRun], metric: str, mode: Mode) -> Metrics:
        """Start with the best run, and add each run that improves the average. Runs that are not
        added get weight 0."""
        measured: dict[tuple[int, ...], Metrics] = {
            (index,): run.metrics or {} for index, run in enumerate(runs)
        }

        def score(indices: Sequence[int]) -> float:
            key = tuple(indices)
            if key not in measured:
                measured[key] = self.measure_average([runs[index] for index in indices])
            if metric not in measured[key]:
                raise LaunchError(
                    f"--metric {metric}, but {self.line.script} measures"
                    f" {', '.join(measured[key])}; give one of these"
                )
            value = measured[key][metric]
            return math.nan if value is None else value

        found = greedy_soup([score([index]) for index in range(len(runs))], score, mode)
        if found is None:
            raise DataError(
                f"--greedy with {metric}, which is NaN for every run; it compares numbers; choose"
                " another --metric, or other runs"
            )
        for index, run in enumerate(runs):
            run.member = replace(run.member, weight=1 / len(found) if index in found else 0.0)
        return measured[tuple(found)]

    def measure_average(self, runs: Sequence[_AveragedRun]) -> Metrics:
        average, chosen = _average(runs)
        names = ", ".join(run.name for run in chosen)
        return self.measure(f"the average of {names}", average.model, None)

    def measure(self, name: str, model: StateDictReader, file: Path | None) -> Metrics:
        say(f"lockstep: evaluating {name}")
        self.count += 1
        if file is None:
            file = self.folder / f"{self.count}.safetensors"
            write_model(model, file)
        status, found = measure(
            file,
            self.line,
            self.options,
            folder=self.folder,
            run_dir=self.folder / f"run-{self.count}",
            stdout=sys.stderr,
        )
        if status != 0:
            raise click.exceptions.Exit(status)
        if len(found) > 1:
            raise LaunchError(
                f"{self.line.script} trains {len(found)} times; runs are compared by one"
                " recipe; give a script that trains once"
            )
        return found[0]


def _write(
    runs: Sequence[_AveragedRun], metrics: Metrics | None, path: Path, *, as_json: bool
) -> None:
    average, chosen = _average(runs)
    note = [{"run": run.name, "weight": run.member.weight} for run in chosen]
    tensors, size = write_model(average.model, path, {METADATA: json.dumps(note)})
    warnings = _warnings(average, chosen[0].name)
    for warning in warnings:
        say(f"lockstep: warning: {warning}")
    if as_json:
        rows = list(map(_row, runs))
        summary = {"path": str(path), "runs": rows, "metrics": metrics, "warnings": warnings}
        print_json(summary)
        return
    _print_table(runs, metrics)
    show(
        f"{path}: {tensors} tensors, {size:,} bytes, the average of"
        f" {', '.join(run.name for run in chosen)}"
    )


def _average(runs: Sequence[_AveragedRun]) -> tuple[WeightAverage, list[_AveragedRun]]:
    return WeightAverage([run.member for run in runs]), [
        run for run in runs if run.member.weight > 0
    ]


def _warnings(average: WeightAverage, first: str) -> list[str]:
    warnings = []
    if statistics := average.statistics:
        warnings.append(
            f"{len(statistics)} running statistics of BatchNorm ({statistics[0]}, ...) are"
            " averaged like weights, which is wrong for the averaged model; measure them on"
            " training data before you use it: torch.optim.swa_utils.update_bn(loader, model)"
        )
    for name, other in average.differing.items():
        if not (statistics and name.endswith(COUNTER)):
            warnings.append(
                f"{name!r} differs between {first} and {other}; it is not floating-point and has"
                f" no mean, so {first}'s is used"
            )
    return warnings


def _row(run: _AveragedRun) -> dict[str, Any]:
    return {
        "run": run.name,
        "of": run.what,
        "weight": run.member.weight,
        "metrics": run.metrics,
        "parameters": run.parameters,
    }


def _print_table(runs: Sequence[_AveragedRun], metrics: Metrics | None) -> None:
    names = list(metrics or {})

    def texts(found: Metrics | None) -> list[str]:
        values = [(found or {}).get(name) for name in names]
        return ["nan" if value is None else f"{value:.6g}" for value in values]

    rows = [["run", "weight", *names]]
    for run in runs:
        weight = run.member.weight
        rows.append([run.name, f"{weight:.4g}" if weight else "left out", *texts(run.metrics)])
    if metrics is not None:
        rows.append(["average", "", *texts(metrics)])
    for line in aligned_lines(rows, left=len(rows[0])):
        show(line)
