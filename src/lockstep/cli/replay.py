"""`lockstep replay`: repeats an old step of a run from a kept checkpoint."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from lockstep.base.errors import CheckpointError, LaunchError, RunDirectoryError, say
from lockstep.base.files import NUMBER, check_kinds, parse_object
from lockstep.base.foreign_text import console, show
from lockstep.base.words import counted
from lockstep.cli.arguments import (
    ScriptCommand,
    count_option,
    json_option,
    launch_option,
    options_from,
    print_json,
    script_arguments,
    together,
    work_folder,
)
from lockstep.cli.run_script import assignments, script_of
from lockstep.cli.target import Target
from lockstep.launch.environment import count_processes
from lockstep.logging.run_files import (
    CHECKSUM,
    EVENTS,
    METRICS,
    RUN,
    is_count,
    read_metadata,
    read_result,
    read_rows,
)
from lockstep.plan import FIXED_IN_BITWISE, Plan
from lockstep.recipe.parameters import saved_values
from lockstep.replay.not_finite import NotFinite, first_words
from lockstep.replay.request import ReplayRequest
from lockstep.replay.step import (
    STEP,
    Replay,
    ReplayedMicrobatch,
    compared,
    joined_parts,
    microbatch_file,
)
from lockstep.scripts.launch import count_gpus, launch_script
from lockstep.scripts.line import ScriptLine
from lockstep.scripts.process import never_trained

MOST_ROWS = 64

_ROW_KINDS = {
    "loss": NUMBER, "gradient_norm": NUMBER, "lr": NUMBER, CHECKSUM: str, "not_finite": dict,
}  # fmt: skip

replay_options = together(
    click.option(
        "--checkpoints",
        metavar="FOLDER",
        help="The folder or URL of the run's checkpoints, if it is not in the run directory.",
    ),
    launch_option("nproc"),
    launch_option("plan", help="Default: the numerics of the run's plan, with replicate=N."),
    launch_option("share_devices"),
    launch_option("allow_change"),
    json_option,
    click.argument("source", metavar="RUN_DIR"),
    script_arguments(required=False),
)


@click.command("replay", cls=ScriptCommand)
@count_option("--step", "step", None, "N", "The step to make again, as in metrics.jsonl.")
@click.option(
    "--without-sample",
    "without",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="K",
    help="Leave this sample of the dataset out of the step. Give it once for each.",
)
@replay_options
def command(
    step: int | None,
    without: tuple[int, ...],
    checkpoints: str | None,
    as_json: bool,
    source: str,
    line: ScriptLine | None,
    **given: Any,
) -> int:
    """Repeat an old step of a run, and show its microbatches.

    Starts from the run's nearest checkpoint before step N, trains on one process (or --nproc), and
    ends after step N. The checkpoint is only read. ls.Saving(keep="log") keeps a checkpoint near
    each step. The command compares the checksum of each logged step's gradient with the checksum in
    the run's metrics.jsonl, and prints the term that each microbatch adds to the loss and to the
    gradient. The default for SCRIPT is the run's script with its arguments.

    \b
    Examples:
      lockstep replay --step 1200 runs/a
      lockstep replay --step 1200 --without-sample 4711 runs/a
      lockstep replay --step 1200 --nproc 2 --json runs/a train.py --lr 0.1

    Exit status: 0; 1 if numerics=bitwise and a replayed step does not have the bits of the run; or
    the status of the process that failed first.
    """
    if step is None:
        raise LaunchError("no step to replay; give one of metrics.jsonl, such as --step 100")
    target, run, line = replayed_run(source, checkpoints, line, given)
    if step > (last := last_step(run, target)):
        raise LaunchError(f"--step {step}; the run's last step is {last}; give a step up to it")
    data = (read_metadata(run).get("recipe") or {}).get("data")
    if without and isinstance(data, dict) and "shards" in data:
        raise LaunchError(
            f"--without-sample {without[0]}; the run trains on an ls.Stream, and only the samples"
            " of a dataset have an index; leave --without-sample out"
        )
    with work_folder("lockstep-replay-") as folder:
        status, found = replay(
            target, run, step, line, given, folder=folder, without=without, quiet=as_json
        )
    if found is None:
        return status
    if as_json:
        print_json(found.as_json())
    else:
        _show(found)
    return int(found.is_bitwise and found.first_difference is not None)


def replayed_run(
    source: str, checkpoints: str | None, line: ScriptLine | None, given: dict[str, Any]
) -> tuple[Target, Path, ScriptLine]:
    """Find the run and its script. Add the run's hyper-parameters and plan to `given`."""
    target = Target.find(source)
    run = target.run
    if run is None:
        raise CheckpointError(f"{source} is no run directory (it has no run.json); give one")
    if checkpoints is not None:
        target = Target.find(checkpoints)
    elif target.elsewhere is not None:
        raise CheckpointError(f"{source}: {target.none_there}, as --checkpoints")
    place = read_metadata(run).get("place_in_script") or 1
    if line is None and place > 1:
        raise LaunchError(
            f"{source} is training {place} of its script, and only steps of the first can be"
            " replayed; give a SCRIPT with this training alone"
        )
    line = line or script_of(run, source, "a step is made again by the script")
    given["set"] = assignments(saved_values(run))
    plan = (read_metadata(run).get("plan") or {}).get("text")
    if plan is None:
        raise RunDirectoryError(
            f"{run / RUN} has no plan, so it is not known what the run computes; lockstep writes"
            " it; give another run directory"
        )
    given["plan"] = given["plan"] or str(replay_plan(plan))
    return target, run, line


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, one for each step. If a resumed run repeated a
    step, return its last row."""
    rows: list[dict[str, Any]] = []
    for row in read_rows(run, METRICS, _is_of_a_step, {}):
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return rows


def last_step(run: Path, target: Target) -> int:
    if (ended := ended_in(run)) is not None:
        return ended
    rows = [*rows_of(run), *read_rows(run, EVENTS, _is_event, {})]
    done = max([row["step"] for row in rows] + [name.step for name in target.names], default=0)
    return done + (read_result(run) is None)


def ended_in(run: Path) -> int | None:
    step = 0
    for row in read_rows(run, EVENTS, _is_event, {}):
        if row["event"] == "run-failed":
            found = row.get("not_finite_in")
            step = found if isinstance(found, int) and is_count(found) else 0
        elif row["event"] in ("run-ended", "preempted"):
            step = 0
    return step if step > max((row["step"] for row in rows_of(run)), default=0) else None


def _is_event(row: Mapping[str, Any]) -> bool:
    return isinstance(row["event"], str)


def _is_of_a_step(row: Mapping[str, Any]) -> bool:
    check_kinds(row, _ROW_KINDS)
    for text in row.get("not_finite", {}).values():
        float(text)
    return "loss" in row


def replay_plan(run_plan: str) -> Plan:
    plan = Plan.parse(run_plan)
    return Plan(
        numerics=plan.numerics,
        checkpointing=plan.checkpointing,
        microbatch_splits=plan.microbatch_splits,
        logits=plan.logits,
        compile=plan.compile,
        **{name: getattr(plan, name) for name in FIXED_IN_BITWISE},
    )


def replay(
    target: Target,
    run: Path,
    step: int,
    line: ScriptLine,
    given: Mapping[str, Any],
    *,
    folder: Path,
    without: Sequence[int] = (),
    by_sample: int | None = None,
    before: int | None = None,
    quiet: bool = False,
) -> tuple[int, Replay | None]:
    run_dir = folder / "run"
    options = options_from({**given, "run_dir": str(run_dir)})
    processes = count_processes(options.nproc or 1, options.validate(), count_gpus, name="--nproc ")
    before = step if before is None else before
    steps = [name.step for name in target.names if name.step < before]
    if not quiet:
        where = (
            f"after step {max(steps)}" if steps else "at step 0, because no checkpoint is earlier"
        )
        on = counted(processes, "process")
        say(f"lockstep replay: begins {where}, ends after step {step}, {on}")
    request = ReplayRequest(
        folder=folder,
        step=step,
        checkpoints=str(target.storage),
        before=before,
        begins_anew=not steps,
        without=without,
        by_sample=by_sample,
    )
    status = launch_script(
        line,
        options,
        count=processes,
        began=time.time(),
        request=request.write(folder),
        stdout=sys.stderr,
    )
    if not (folder / STEP).is_file():
        if status == 0:
            raise never_trained(line, f"step {step}", "the command repeats that step")
        return status, None
    return status, _result(run, step, folder, without, processes)


def _result(
    run: Path,
    step: int,
    folder: Path,
    without: Sequence[int],
    processes: int,
) -> Replay:
    whole = parse_object((folder / STEP).read_text(encoding="utf-8"))
    parts = [
        _microbatch(each)
        for rank in range(processes)
        for each in json.loads((folder / microbatch_file(rank)).read_text(encoding="utf-8"))
    ]
    before, now = read_metadata(run), read_metadata(folder / "run")
    microbatches = joined_parts(parts)
    loss = whole["loss"]
    if loss is None:  # the step has raised an exception
        loss = sum(each.part or 0.0 for each in microbatches if not each.model)
    return Replay(
        step=step,
        begin=whole["begin"],
        plan=now["plan"]["text"],
        run_plan=before["plan"]["text"],
        loss=loss,
        squares=whole["squares"],
        before=whole["before"],
        microbatches=microbatches,
        on_the_way=compared(
            rows_of(run),
            rows_of(folder / "run"),
            after=whole["begin"],
            to=step - bool(without),
        ),
        without=without,
        environment=list(_differences(before, now)),
        ended_the_run=ended_in(run) == step,
    )


def _microbatch(values: dict[str, Any]) -> ReplayedMicrobatch:
    places = [NotFinite(**each) for each in values.pop("places", ())]
    return ReplayedMicrobatch(**values, places=places)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = (each.get("recipe") or {} for each in (before, now))
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            yield f"recipe's {name}: {old[name]}, now {new[name]}"
    old, new = (each.get("code") or {} for each in (before, now))
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            yield f"code of {name}"
    for place in ("versions", "device"):
        pair = [(each.get("environment") or {}).get(place) or {} for each in (before, now)]
        for name in sorted(pair[0].keys() & pair[1].keys()):
            if pair[0][name] != pair[1][name]:
                yield f"{name}: {pair[0][name]}, now {pair[1][name]}"


def _show(found: Replay) -> None:
    from rich.table import Table

    whole = Table(title=f"step {found.step}", title_justify="left")
    has_models = any(each.model for each in found.microbatches)
    if has_models:
        whole.add_column("model", justify="right")
    for name in ("microbatch", "part of the loss", "loss", "gradient norm", "largest in"):
        whole.add_column(name, justify="left" if name == "largest in" else "right")
    whole.add_column("samples", overflow="ellipsis", no_wrap=True, max_width=60)
    for each in found.microbatches[:MOST_ROWS]:
        largest = max(each.squares, key=each.squares.__getitem__) if each.squares else ""
        whole.add_row(
            *([str(each.model)] if has_models else []),
            str(each.microbatch),
            _text(each.part),
            _text(each.total),
            _text(each.norm),
            largest,
            ", ".join(map(str, each.samples)),
        )
    whole.add_section()
    largest = max(found.squares, key=found.squares.__getitem__, default="")
    models = [""] if has_models else []
    whole.add_row(*models, "all", _text(found.loss), "", _text(found.norm), largest, "")
    console(120).print(whole)
    if len(found.microbatches) > MOST_ROWS:
        show(f"{len(found.microbatches) - MOST_ROWS} more microbatches: --json has all")
    for each, place in found.first_not_finite:
        samples = () if place is None else place.samples
        of = f" (samples {', '.join(map(str, samples))})" if samples else ""
        show(f"{each.name}: {first_words(place)}{of}")
    if found.without:
        show(f"without {', '.join(f'sample {each}' for each in found.without)}")
    show(found.verdict())
    if found.environment and not found.same_bits:
        show(f"not as in the run: {'; '.join(found.environment)}")


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
