"""Compares two runs of a script: a resumed run with an uninterrupted run, or a run on several
processes with a run on one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.audit.checks.gradients import reduced_of, whole_projection
from lockstep.audit.finding import Area, AreaResult, Cause
from lockstep.audit.records import Rank, Records, first_line
from lockstep.evidence.rows import Row
from lockstep.evidence.tensors import Summaries, TensorSummary, distance, sketch_difference
from lockstep.evidence.tolerance import TOLERANCE, MeasuredRounding
from lockstep.evidence.trace import RankTrace, StepTrace, Trace

RESUME_TOLERANCE = 1e-6
"""Largest relative difference between a saved tensor and the loaded tensor."""
KINDS = {"gradients": "gradient", "parameters": "parameter"}
"""Kinds of tensors, in the order of comparison. The first kind that differs shows the fault."""


def check_resumed(whole: Records, interrupted: Records, resumed: Records, saved: int) -> AreaResult:
    result = AreaResult(Area.RESUME)
    runs = (whole, interrupted, resumed)
    if not (resumed.steps and interrupted.steps) or len({each.world_size for each in runs}) > 1:
        result.miss("the resumed script took no step; it may have been at its end already")
        return result
    for rank, stopped, again in zip(*(each.ranks for each in runs), strict=True):
        first = again.steps[0]
        before = _optimizer_step(stopped, first["optimizer"], saved - 1)
        after = _optimizer_step(rank, first["optimizer"], saved)
        if before is None or after is None:
            continue
        line = first_line(again.of("load")) or first["line"]
        _check_tensors(result, before, first, rank.rank, line)
        _check_rates(result, rank, again, saved, line)
        if _samples(rank)[: len(_samples(stopped))] == _samples(stopped):
            _check_batches(result, rank, again, after, first)
        else:
            result.miss(
                "each start of the script has other samples (no seed): whether a resume repeats"
                " some cannot be seen"
            )
    result.right = f"the script goes on after step {saved} as the run without interruption did"
    return result


def _optimizer_step(rank: Rank, optimizer: int, index: int) -> Row | None:
    rows = (row for row in rank.steps if (row["optimizer"], row["index"]) == (optimizer, index))
    return next(rows, None)


def _check_rates(result: AreaResult, rank: Rank, again: Rank, saved: int, line: str) -> None:
    """Compare the learning rates in all steps after a resume. The first step may have the learning
    rate of the loaded optimizer."""
    rates = {(row["optimizer"], row["index"]): row["lr"] for row in rank.steps}
    for row in again.steps:
        step = saved + row["index"]
        expected: Any = rates.get((row["optimizer"], step), row["lr"])
        if row["lr"] != expected:
            text = (
                f"rank {rank.rank}: the learning rate of step {step} is {expected[0]} without"
                f" interruption, {row['lr'][0]} resumed"
            )
            result.find(Cause.RESUME_SCHEDULE, text, line=line, step=step)
            return


def _check_tensors(result: AreaResult, before: Row, first: Row, rank: int, line: str) -> None:
    step = before["index"] + 1
    for cause, saved, loaded, what, other in (
        (
            Cause.RESUME_MODEL,
            before["parameters"],
            first["before"],
            "",
            "another one than it was when the script was interrupted",
        ),
        (
            Cause.RESUME_OPTIMIZER,
            before["states"],
            first["states_before"],
            "the optimizer's ",
            "another one",
        ),
    ):
        names = [
            name
            for name, sketch in saved.items()
            if (name not in loaded and cause is Cause.RESUME_OPTIMIZER)
            or sketch_difference(sketch, loaded.get(name)) > RESUME_TOLERANCE
        ]
        if names:
            text = f"{what}{names[0]} is {other if names[0] in loaded else 'missing'}"
            text = f"rank {rank}: before step {step} {text}"
            result.find(cause, text, line=line, step=step, names=names)


def _check_batches(result: AreaResult, rank: Rank, again: Rank, after: Row, first: Row) -> None:
    step = after["index"]
    one, other = _first_backward(rank, after), _first_backward(again, first)
    if one is None or other is None:
        return
    batch, batch_again = _batch_before(rank, one), _batch_before(again, other)
    if batch is not None and batch_again is not None and _key(batch) != _key(batch_again):
        both = len(set(_key(batch)) & set(_key(batch_again)))
        places = [(each["loader"], each["number"]) for each in (batch_again, batch)]
        loops = (row for row in again.of("pass") if (row["loader"], row["number"]) == places[0])
        result.find(
            Cause.RESUME_DATA,
            f"rank {rank.rank}: of the {len(_key(batch))} samples of step {step} the resumed"
            f" script has {both} in it; it began pass {places[0][1]} over its data, and the run"
            f" without interruption was in pass {places[1][1]}",
            line=first_line(loops, "loop"),
            step=step,
        )
    drawn = all(row["state"] != row["state_at_batch"] for row in (one, other))
    if drawn and one["state"] != other["state"]:
        text = (
            f"rank {rank.rank}: the forward of step {step} drew other random numbers than without"
            " interruption"
        )
        line = first_line([*again.of("load"), other])
        result.find(Cause.RESUME_RANDOM, text, line=line, step=step)


def _first_backward(rank: Rank, step: Row) -> Row | None:
    number = min((int(each) for each in step["added"]), default=None)
    return next((row for row in rank.of("backward") if row["number"] == number), None)


def _batch_before(rank: Rank, backward: Row) -> Row | None:
    for row in reversed(rank.rows[: backward["place"]]):
        if row["kind"] == "batch" and row["loader"] == backward["loader"]:
            return row
    return None


def _samples(rank: Rank) -> list[list[object]]:
    batches = (_batch_before(rank, row) for row in rank.of("backward"))
    return [_key(batch) for batch in batches if batch is not None]


def _key(batch: Row) -> list[object]:
    return list(batch["indices"] or batch["samples"])


def check_compare(
    reference: Records, perturbed: Sequence[Records], others: Mapping[int, Records], likely: str
) -> AreaResult:
    result = AreaResult(Area.COMPARE)
    steps = min(each.steps for each in [reference, *perturbed, *others.values()])
    if not steps:
        result.miss("not all runs took a step")
        return result
    rounding = MeasuredRounding(
        _trace(reference, steps), [_trace(each, steps) for each in perturbed], sign_flip=0.0
    )
    for processes, records in others.items():
        difference = _first_difference(rounding, _trace(records, steps), steps)
        if difference is not None:
            step, kind, name, off, times = difference
            result.find(
                Cause.DEPENDS_ON_PROCESSES,
                f"on {processes} processes, step {step}: the {kind} of {name} is off by {off:.2g}"
                f" of its size from that on one process, {times:.3g} × what rounding does;"
                f" {_compare_samples(reference, records, step)}{likely}",
                line=_step(reference, step)[0]["line"],
                step=step,
                names=[name],
            )
    result.right = (
        f"{steps} steps on {', '.join(map(str, others))} processes are those of one process, to"
        f" within {TOLERANCE:g} × rounding"
    )
    return result


def _first_difference(
    rounding: MeasuredRounding, other: Trace, steps: int
) -> tuple[int, str, str, float, float] | None:
    """Find the first step with a difference beyond the tolerance. Return the step, the kind and
    name of the tensor, the relative difference, and its multiple of the rounding."""
    for step in range(steps):
        ours, theirs = (each.rank_0.steps[step].tensors for each in (rounding.reference, other))
        for kind, word in KINDS.items():
            allowed = rounding.of_tensors(step, kind)
            found = [(0.0, 0.0, "")]
            for name, summary in ours[kind].items():
                if summary is not None and (there := theirs[kind].get(name)) is not None:
                    away = distance(summary, there)
                    off = away / summary.norm if summary.norm else 0.0
                    found.append((away / allowed[name], off, name))
            times, off, name = max(found)
            if times > TOLERANCE:
                return step, word, name, off, times
    return None


def _trace(records: Records, steps: int) -> Trace:
    rows = [_step(records, step) for step in range(steps)]
    trace = RankTrace({"parameters": _summaries("before", rows[0])})
    for each in rows:
        tensors = {kind: _summaries(kind, each) for kind in KINDS}
        trace.steps.append(
            StepTrace(loss=math.nan, weight=None, norm=None, lr=None, gain=1.0, tensors=tensors)
        )
    return Trace(None, "", records.world_size, {}, 0, {0: trace}, [])


def _step(records: Records, step: int) -> list[Row]:
    return next(rows for rows in records.together() if rows[0]["index"] == step)


def _summaries(kind: str, rows: Sequence[Row]) -> Summaries:
    summaries: Summaries = {}
    for name in rows[0]["parameters"]:
        if kind == "gradients":
            whole = reduced_of(rows, 0, name)
        else:
            whole = whole_projection(rows, 0, name, [row[kind].get(name) for row in rows])
        summaries[name] = (
            None if whole is None else TensorSummary(whole, float((whole**2).mean() ** 0.5))
        )
    return summaries


def _compare_samples(reference: Records, other: Records, step: int) -> str:
    one, many = (_samples_of(each, step) for each in (reference, other))
    if not one or not many:
        return "the samples were not seen"
    if one == many:
        return "the samples are the same"
    return "the samples are others: the order of the data depends on the number of processes"


def _samples_of(records: Records, step: int) -> list[str]:
    samples: list[str] = []
    for rank, row in zip(records.ranks, _step(records, step), strict=True):
        batches: list[str] = []
        for each in rank.rows:
            if each["kind"] == "batch":
                batches = each["samples"]
            elif each["kind"] == "backward" and str(each["number"]) in row["added"]:
                samples += batches
    return sorted(samples)
