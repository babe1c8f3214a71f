"""`lockstep blame`: finds the microbatch, samples and layer that made a loss or gradient jump."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lockstep.base.errors import LaunchError
from lockstep.base.foreign_text import show
from lockstep.cli.arguments import (
    ScriptCommand,
    count_option,
    print_json,
    work_folder,
)
from lockstep.cli.replay import ended_in, replay, replay_options, replayed_run, rows_of
from lockstep.cli.target import Target
from lockstep.replay.blame import (
    LEAST_BEFORE,
    Blame,
    Spike,
    cause_of,
    largest_spike,
    samples_not_finite,
    spike_at,
    spike_before_the_end,
    suspected,
)
from lockstep.replay.step import Replay
from lockstep.scripts.line import ScriptLine

LATER_STEPS = 3


@click.command("blame", cls=ScriptCommand)
@count_option("--step", "step", None, "N", "The step to explain. Default: as above.")
@replay_options
def command(
    step: int | None,
    checkpoints: str | None,
    as_json: bool,
    source: str,
    line: ScriptLine | None,
    **given: Any,
) -> int:
    """Find what made the loss or the gradient of a run jump, or NaN.

    Replays one step of the run, as lockstep replay does. The default is the step in which a NaN
    ended the run, or else the step with the most unusual loss or gradient norm. If the steps just
    before the default step are also unusual, the default is the first unusual step. --step names
    another step. If a microbatch of the step is unusual, the command measures the gradient of each
    of its samples. If the replay does not reproduce the run's gradients, the command also replays
    steps after the next checkpoint.

    \b
    Examples:
      lockstep blame runs/a
      lockstep blame --step 1200 runs/a

    Exit status: 0 if it names a cause or finds no unusual step, 2 for a mistake, or the status of
    the process that failed first.
    """
    target, run, line = replayed_run(source, checkpoints, line, given)
    rows, ended = rows_of(run), ended_in(run)
    if step is None:
        spike = largest_spike(rows) if ended is None else spike_before_the_end(rows)
    else:
        spike = None if step == ended else _spike(rows, step, run)
    at = ended if spike is None else spike.step
    if at is None:
        if as_json:
            print_json(None)
        else:
            show(f"no step of {source} has an unusual loss or gradient norm")
        return 0
    with work_folder("lockstep-blame-") as folder:
        found = _explained(target, run, at, line, given, folder=folder)
    if as_json:
        print_json({**found.as_json(), "spike": _spike_json(at, spike)})
        return 0
    if ended is not None and step in (None, ended):
        show(f"step {ended}: the run ended here, because the loss or the gradient is not finite")
    if spike is not None:
        show(
            f"step {at}: {spike.metric} {spike.value:.6g}; the median of the steps before it is"
            f" {spike.usual:.6g}"
        )
    show(f"cause: {found.text}")
    return 0


def _spike_json(step: int, spike: Spike | None) -> dict[str, Any]:
    names = ("metric", "value", "usual")
    return {"step": step, **{name: getattr(spike, name, None) for name in names}}


def _spike(rows: list[dict[str, Any]], step: int, run: Path) -> Spike:
    place = next((place for place, row in enumerate(rows) if row["step"] == step), None)
    if place is None:
        raise LaunchError(
            f"--step {step} has no line in {run / 'metrics.jsonl'}; give a step that has"
            f" one, or see its microbatches: lockstep replay --step {step} RUN_DIR"
        )
    spike = spike_at(rows, place)
    if spike is None:
        raise LaunchError(
            f"--step {step} has fewer than {LEAST_BEFORE} logged steps before it, too few to"
            " compare it with; give a later one, or see its microbatches: lockstep replay"
            f" --step {step} RUN_DIR"
        )
    return spike


def _explained(
    target: Target,
    run: Path,
    step: int,
    line: ScriptLine,
    given: dict[str, Any],
    *,
    folder: Path,
) -> Blame:
    rows = rows_of(run)

    def again(name: str, at: int, **how: Any) -> Replay:
        own = folder / name
        own.mkdir()
        status, found = replay(target, run, at, line, given, folder=own, **how)
        if found is None:
            raise SystemExit(status)
        return found

    as_it_was = again("as-it-was", step)
    by_sample = later = None
    if as_it_was.first_unlike is None and as_it_was.begin and suspected(as_it_was) is None:
        # the checkpoint before the step may already hold a wrong state: replay from an earlier one
        earlier = again("earlier", step, before=as_it_was.begin)
        as_it_was = earlier if earlier.first_unlike else as_it_was
    if (first := as_it_was.first_unlike) is not None:
        if (at := _later_step(target, rows, first.step)) is not None:
            later = again("later", at)
    elif (
        (suspect := suspected(as_it_was)) is not None
        and len(suspect.samples) > 1
        and not samples_not_finite(as_it_was)
    ):
        by_sample = again("by-sample", step, by_sample=suspect.microbatch)
    return cause_of(as_it_was, rows, by_sample=by_sample, later=later)


def _later_step(target: Target, rows: list[dict[str, Any]], first: int) -> int | None:
    """Return a logged step that a replay from a checkpoint after step `first` can reach, or
    None."""
    names = sorted(name.step for name in target.names)
    for place, begin in enumerate(names):
        if begin < first:
            continue
        until = names[place + 1] if place + 1 < len(names) else None
        steps = [
            row["step"]
            for row in rows
            if row["step"] > begin and (until is None or row["step"] <= until)
        ]
        if steps:
            return int(steps[:LATER_STEPS][-1])
    return None
