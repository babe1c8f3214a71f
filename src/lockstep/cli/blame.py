"""`lockstep blame`: the step, microbatch, samples and layer that made a loss or gradient jump."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lockstep.base.errors import LaunchError
from lockstep.base.foreign_text import show
from lockstep.cli.arguments import (
    ScriptCommand,
    count_option,
    work_folder,
)
from lockstep.cli.replay import ended_in, replay, replay_options, replayed_run, rows_of
from lockstep.cli.target import Target
from lockstep.replay.blame import (
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
"""Number of logged steps that are made again from a later checkpoint."""


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

    Takes the step in which a NaN ended the run, or the step whose loss or gradient norm is most
    unusual, or --step, and makes it again as lockstep replay does. If a microbatch is unusual, it
    then looks at the gradient of each of its samples. If none is unusual in the step that ended
    the run, it takes the first of the unusual steps that led there. If the run's gradients do not
    come back, it tries steps after the next checkpoint.

    \b
    Examples:
      lockstep blame runs/a
      lockstep blame --step 1200 runs/a

    Exit status: 0 if it names a cause or finds no unusual step, 2 for a mistake, or the status of
    the process that failed first.
    """
    target, run, line = replayed_run(source, checkpoints, line, given)
    ended, spike = ended_in(run), None
    step = ended if step is None else step
    if step is None or step != ended:
        if (spike := _spike(rows_of(run), step, run)) is None:
            if as_json:
                print(json.dumps(None))
            else:
                show(f"no step of {source} has an unusual loss or gradient norm")
            return 0
        step = spike.step
    found = _explained(target, run, step, line, given)
    if step == ended and found.cause in ("all alike", "learning rate"):
        spike = spike_before_the_end(rows_of(run))
        found = found if spike is None else _explained(target, run, spike.step, line, given)
    if as_json:
        print(json.dumps({**found.as_json(), "spike": _spike_json(step, spike)}, indent=2))
        return 0
    if step == ended:
        show(f"step {step}: the run ended here, because the loss or the gradient is not finite")
    if spike is not None:
        show(
            f"step {spike.step}: {spike.metric} {spike.value:.6g}; the median of the steps before"
            f" it is {spike.usual:.6g}"
        )
    show(f"cause: {found.text}")
    return 0


def _spike_json(step: int, spike: Spike | None) -> dict[str, Any]:
    """Return the unusual value of the step. None: the run ended in the step, which has no row."""
    if spike is None:
        return {"step": step, "metric": None, "value": None, "usual": None}
    values = {"metric": spike.metric, "value": str(spike.value), "usual": spike.usual}
    return {"step": spike.step, **values}


def _spike(rows: list[dict[str, Any]], step: int | None, run: Path) -> Spike | None:
    if step is None:
        return largest_spike(rows)
    place = next((place for place, row in enumerate(rows) if row["step"] == step), None)
    if place is None:
        raise LaunchError(f"--step {step}, and {run / 'metrics.jsonl'} has no line of it")
    spike = spike_at(rows, place)
    if spike is None:
        raise LaunchError(f"--step {step}: too few steps are logged before it to compare it with")
    return spike


def _explained(
    target: Target, run: Path, step: int, line: ScriptLine, given: dict[str, Any]
) -> Blame:
    """Return the cause. Ends with the status of a replay that does not reach its step."""
    with work_folder("lockstep-blame-") as folder:

        def again(name: str, at: int, **how: Any) -> Replay:
            own = folder / name
            own.mkdir()
            status, found = replay(target, run, at, line, given, folder=own, **how)
            if found is None:
                raise SystemExit(status)
            return found

        return _cause(target, rows_of(run), step, again)


def _cause(
    target: Target, rows: list[dict[str, Any]], step: int, again: Callable[..., Replay]
) -> Blame:
    """Return the cause. `again`: makes a step again, under a name."""
    as_it_was = again("as-it-was", step)
    by_sample = later = None
    if as_it_was.first_unlike is None and as_it_was.begin and suspected(as_it_was) is None:
        # the state that was saved may be wrong already
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
    """Return a logged step to make again from the earliest checkpoint that has done step `first`;
    None: there is none."""
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
