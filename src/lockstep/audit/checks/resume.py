"""Checks that a resumed run goes on as the run without interruption did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.finding import Area
from lockstep.audit.records import Rank, Records
from lockstep.audit.remedies import Cause
from lockstep.evidence.rows import Row
from lockstep.evidence.tensors import sketch_difference

SAME = 1e-6
"""Largest relative difference of tensors that were saved and loaded."""


def check_resumed(whole: Records, interrupted: Records, resumed: Records, saved: int) -> AreaResult:
    """`whole`: the run without interruption. `interrupted`: the run that ended after `saved` steps.
    `resumed`: the run that goes on from there."""
    result = AreaResult(Area.RESUME)
    if (
        not resumed.steps
        or not interrupted.steps
        or len({each.world_size for each in (whole, interrupted, resumed)}) > 1
    ):
        result.miss("the resumed script took no step; it may have been at its end already")
        return result
    for rank, stopped, again in zip(whole.ranks, interrupted.ranks, resumed.ranks, strict=True):
        first = again.steps[0]
        before = next(
            (
                row
                for row in stopped.steps
                if (row["optimizer"], row["index"]) == (first["optimizer"], saved - 1)
            ),
            None,
        )
        after = next(
            (
                row
                for row in rank.steps
                if (row["optimizer"], row["index"]) == (first["optimizer"], saved)
            ),
            None,
        )
        if before is None or after is None:
            continue
        line = _load_line(again) or first["line"]
        _check_tensors(result, before, first, rank.rank, line)
        _check_rates(result, rank, again, saved, line)
        if _samples(rank)[: len(_samples(stopped))] == _samples(stopped):
            _check_batches(result, rank, again, after, first, saved)
        else:
            result.miss(
                "each start of the script has other samples (no seed): whether a resume repeats"
                " some cannot be seen"
            )
    result.right = f"the script goes on after step {saved} as the run without interruption did"
    return result


def _check_rates(result: AreaResult, rank: Rank, again: Rank, saved: int, line: str) -> None:
    """Compare the learning rates of all steps after the resume: an optimizer's state has that of
    the first one."""
    rates = {(row["optimizer"], row["index"]): row["lr"] for row in rank.steps}
    for row in again.steps:
        step = saved + row["index"]
        expected: Any = rates.get((row["optimizer"], step), row["lr"])
        if row["lr"] != expected:
            texts = f"{expected[0]} without interruption, {row['lr'][0]} resumed"
            result.find(
                Cause.RESUME_SCHEDULE,
                f"rank {rank.rank}: the learning rate of step {step} is {texts}",
                line=line,
                step=step,
            )
            return


def _samples(rank: Rank) -> list[list[object]]:
    return [
        _key(batch)
        for row in rank.of("backward")
        if (batch := _batch_before(rank, row)) is not None
    ]


def _check_tensors(result: AreaResult, before: Row, first: Row, rank: int, line: str) -> None:
    step = before["index"] + 1
    names = [
        name
        for name in before["parameters"]
        if sketch_difference(before["parameters"][name], first["before"].get(name)) > SAME
    ]
    if names:
        text = (
            f"rank {rank}: before step {step} {names[0]} is another one than it was when the script"
            " was interrupted"
        )
        result.find(Cause.RESUME_MODEL, text, line=line, step=step, names=names)
    names = [
        name
        for name, sketch in before["states"].items()
        if name not in first["states_before"]
        or sketch_difference(sketch, first["states_before"][name]) > SAME
    ]
    if names:
        missing = "is missing" if names[0] not in first["states_before"] else "is another one"
        text = f"rank {rank}: before step {step} the optimizer's {names[0]} {missing}"
        result.find(Cause.RESUME_OPTIMIZER, text, line=line, step=step, names=names)


def _check_batches(
    result: AreaResult, rank: Rank, again: Rank, after: Row, first: Row, saved: int
) -> None:
    one, other = _first_backward(rank, after), _first_backward(again, first)
    if one is None or other is None:
        return
    batch, batch_again = _batch_before(rank, one), _batch_before(again, other)
    if batch is not None and batch_again is not None and _key(batch) != _key(batch_again):
        both = len(set(_key(batch)) & set(_key(batch_again)))
        result.find(
            Cause.RESUME_DATA,
            f"rank {rank.rank}: of the {len(_key(batch))} samples of step {saved} the resumed"
            f" script has {both} in it; it began pass {batch_again['number']} over its data, and"
            f" the run without interruption was in pass {batch['number']}",
            line=_loop_line(again, batch_again),
            step=saved,
        )
    drawn = one["state"] != one["state_at_batch"] and other["state"] != other["state_at_batch"]
    if drawn and one["state"] != other["state"]:
        text = (
            f"rank {rank.rank}: the forward of step {saved} drew other random numbers than without"
            " interruption"
        )
        result.find(Cause.RESUME_RANDOM, text, line=_load_line(again) or other["line"], step=saved)


def _first_backward(rank: Rank, step: Row) -> Row | None:
    number = min((int(each) for each in step["added"]), default=None)
    return next((row for row in rank.of("backward") if row["number"] == number), None)


def _batch_before(rank: Rank, backward: Row) -> Row | None:
    rows = [
        row
        for row in rank.of("batch")
        if row["place"] < backward["place"] and row["loader"] == backward["loader"]
    ]
    return rows[-1] if rows else None


def _key(batch: Row) -> list[object]:
    """The samples of a batch: their places in the data if they are known, else what they hold."""
    return list(batch["indices"] or batch["samples"])


def _load_line(rank: Rank) -> str:
    rows = rank.of("load")
    return str(rows[0]["line"]) if rows else ""


def _loop_line(rank: Rank, batch: Row) -> str:
    rows: Sequence[Row] = [
        row
        for row in rank.of("pass")
        if (row["loader"], row["number"]) == (batch["loader"], batch["number"])
    ]
    return str(rows[0]["loop"]) if rows else ""
