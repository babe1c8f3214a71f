"""Compares what a script learned on one process with what it learned on several, with one global
batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.checks.gradients import reduced_of, whole_projection
from lockstep.audit.finding import Area
from lockstep.audit.records import Records
from lockstep.audit.remedies import Cause
from lockstep.evidence.rows import Row
from lockstep.evidence.tensors import Summaries, TensorSummary, distance
from lockstep.evidence.tolerance import TOLERANCE, MeasuredRounding
from lockstep.evidence.trace import RankTrace, StepTrace, Trace

KINDS = {"gradients": "gradient", "parameters": "parameter"}
"""Tensors that are compared in each step, in this order: the fault is in the first that differs."""


def check_compare(
    reference: Records, perturbed: Sequence[Records], others: Mapping[int, Records], likely: str
) -> AreaResult:
    """`reference`: on one process. `perturbed`: the same, from parameters that differ by one unit
    in the last place. `others`: by their number of processes. `likely`: the cause, if it is known,
    for the evidence."""
    result = AreaResult(Area.COMPARE)
    steps = min([reference.steps, *(each.steps for each in [*perturbed, *others.values()])])
    if not steps:
        result.miss("not all runs took a step")
        return result
    rounding = MeasuredRounding(
        _trace(reference, steps), [_trace(each, steps) for each in perturbed], sign_flip=0.0
    )
    for processes, records in others.items():
        found = _first_difference(rounding, _trace(records, steps), steps)
        if found is not None:
            step, kind, name, off, times = found
            result.find(
                Cause.DEPENDS_ON_PROCESSES,
                f"on {processes} processes, step {step}: the {kind} of {name} is off by {off:.2g}"
                f" of its size from that on one process, {times:.3g} × what rounding does;"
                f" {_samples(reference, records, step)}{likely}",
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
    for step in range(steps):
        ours, theirs = (each.rank_0.steps[step].tensors for each in (rounding.reference, other))
        for kind in KINDS:
            allowed = rounding.of_tensors(step, kind)
            found = []
            for name, summary in ours[kind].items():
                there = theirs[kind].get(name)
                if summary is not None and there is not None:
                    away = distance(summary, there)
                    relative = away / summary.norm if summary.norm else 0.0
                    found.append((away / allowed[name], relative, name))
            times, off, name = max(found, default=(0.0, 0.0, ""))
            if times > TOLERANCE:
                return step, KINDS[kind], name, off, times
    return None


def _trace(records: Records, steps: int) -> Trace:
    """The gradients and parameters that a run's optimizers saw, as a trace of one rank."""
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
    found: Summaries = {}
    for name in rows[0]["parameters"]:
        if kind == "gradients":
            whole = reduced_of(rows, 0, name)
        else:
            whole = whole_projection(rows, 0, name, [row[kind].get(name) for row in rows])
        norm = 0.0 if whole is None else float((whole**2).mean() ** 0.5)
        found[name] = None if whole is None else TensorSummary(whole, norm)
    return found


def _samples(reference: Records, other: Records, step: int) -> str:
    one, many = (_samples_of(each, step) for each in (reference, other))
    if not one or not many:
        return "the samples were not seen"
    return (
        "the samples are the same"
        if one == many
        else "the samples are others: the order of the data depends on the number of processes"
    )


def _samples_of(records: Records, step: int) -> list[str]:
    found: list[str] = []
    for rank, row in zip(records.ranks, _step(records, step), strict=True):
        batches: list[str] = []
        for each in rank.rows:
            if each["kind"] == "batch":
                batches = each["samples"]
            elif each["kind"] == "backward" and str(each["number"]) in row["added"]:
                found += batches
    return sorted(found)
