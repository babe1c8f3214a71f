"""Compares what a script learned on one process with what it learned on several, with one global
batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.checks.gradients import reduced_of
from lockstep.audit.finding import Area, Cause
from lockstep.audit.records import Records, Row, Vector, vector
from lockstep.verify.tolerance import MINIMUM_ULPS, TOLERANCE
from lockstep.verify.trace_reader import EPS

KINDS = {"gradient": "applied", "parameter": "parameters"}
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
    for processes, records in others.items():
        found = _first_difference(reference, perturbed, records, steps)
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
    reference: Records, perturbed: Sequence[Records], other: Records, steps: int
) -> tuple[int, str, str, float, float] | None:
    """The first step that differs, and the tensor in it that is furthest off."""
    for step in range(steps):
        runs = [_step(each, step) for each in (reference, *perturbed)]
        for kind in KINDS:
            worst = max(_differences(kind, runs, _step(other, step)), default=None)
            if worst is not None and worst[0] > TOLERANCE:
                return step, kind, worst[2], worst[1], worst[0]
    return None


def _differences(
    kind: str, runs: Sequence[Sequence[Row]], other: Sequence[Row]
) -> list[tuple[float, float, str]]:
    """The distance of each tensor, in multiples of rounding and relative to its size, and its
    name."""
    found = []
    names = [name for name in runs[0][0]["parameters"] if name in other[0]["parameters"]]
    typical = max((_norm(_tensor(kind, runs[0], name)) for name in names), default=0.0)
    for name in names:
        same = [_tensor(kind, rows, name) for rows in runs]
        there = _tensor(kind, other, name)
        if any(each is None for each in same) or there is None:
            continue
        size = _norm(same[0])
        noise = max(_distance(one, two) for one, two in combinations(same, 2))
        rounding = max(noise, MINIMUM_ULPS * EPS["float32"] * max(size, 1e-3 * typical))
        distance = _distance(same[0], there)
        found.append(
            (distance / rounding if rounding else 0.0, distance / size if size else 0.0, name)
        )
    return found


def _step(records: Records, step: int) -> list[Row]:
    return next(rows for rows in records.together() if rows[0]["index"] == step)


def _tensor(kind: str, rows: Sequence[Row], name: str) -> Vector | None:
    if kind == "gradient":
        return reduced_of(rows, 0, name)
    parts = [vector(row["parameters"].get(name)) for row in rows]
    if name not in rows[0]["sharded"]:
        return parts[0]
    present = [each for each in parts if each is not None]
    return sum(present[1:], present[0]) if len(present) == len(parts) else None


def _norm(value: Vector | None) -> float:
    return 0.0 if value is None else float((value**2).mean() ** 0.5)


def _distance(one: Vector | None, other: Vector | None) -> float:
    return 0.0 if one is None or other is None else _norm(one - other)


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
    """The samples of the batches that the backwards of a step followed, of all ranks."""
    found: list[str] = []
    for rank, row in zip(records.ranks, _step(records, step), strict=True):
        batches: list[str] = []
        for each in rank.rows:
            if each["kind"] == "batch":
                batches = each["samples"]
            elif each["kind"] == "backward" and str(each["number"]) in row["added"]:
                found += batches
    return sorted(found)
