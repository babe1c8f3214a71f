"""Checks that the learning rate follows the optimizer's steps, and that it is equal on all
ranks."""

from __future__ import annotations

import statistics

from lockstep.audit.finding import Area, AreaResult, Cause
from lockstep.audit.records import Rank, Records
from lockstep.evidence.rows import Row

LEAST_STEPS = 4


def check_schedules(records: Records) -> AreaResult:
    result = AreaResult(Area.SCHEDULE)
    if not records.steps:
        return result
    compared = judged = 0
    for rows in records.together():
        rates = [row["lr"] for row in rows]
        compared += any(rate is not None for each in rates for rate in each)
        if any(each != rates[0] for each in rates):
            texts = [f"{each[0]:.4g}" if each and each[0] is not None else "none" for each in rates]
            result.find(Cause.LEARNING_RATES_DIFFER, f"{', '.join(texts)} on the ranks", rows[0])
    rank = records.ranks[0]
    stepped = rank.of("schedule")
    for optimizer in sorted({row["optimizer"] for row in stepped}):
        if optimizer < 0:
            result.miss("a schedule's optimizer was not seen")
        else:
            own = (row["schedule"] for row in stepped if row["optimizer"] == optimizer)
            judged += sum(
                _check_speed(result, records, optimizer, each) for each in dict.fromkeys(own)
            )
        _check_skipped(result, rank, optimizer)
    seen = []
    if not compared:
        result.miss("no learning rate was seen in steps that all ranks took")
    elif records.world_size > 1:
        seen = [f"one learning rate on all ranks in {compared} steps"]
    if judged:
        seen.append("no schedule is stepped more often than its optimizer")
    elif not stepped:
        result.miss("no schedule of torch was stepped")
    result.right = "; ".join(seen)
    return result


def _check_speed(result: AreaResult, records: Records, optimizer: int, schedule: int) -> bool:
    rank = records.ranks[0]
    between = _calls_between_steps(rank, optimizer, schedule)
    if len(between) < LEAST_STEPS:
        result.miss(
            f"a schedule was stepped among {len(between)} steps of its optimizer, too few to tell"
            " its speed (more --steps)"
        )
        return False
    calls = statistics.median(len(each) for each in between)
    if calls < 2:
        return True
    last = next(each for each in reversed(between) if each)[-1]
    if str(last.get("by", "")).startswith("accelerate") and calls == records.world_size:
        return _check_horizon(result, rank, optimizer, last, int(calls))
    result.find(
        Cause.SCHEDULE_SPEED,
        f"{last['type']} was stepped {calls:g} times for each step of the optimizer",
        line=last["line"],
    )
    return True


def _check_horizon(result: AreaResult, rank: Rank, optimizer: int, last: Row, calls: int) -> bool:
    """Check the length of a schedule that Accelerate steps once for each process. Return True if
    the length of the schedule is known."""
    steps = sum(row["optimizer"] == optimizer for row in rank.steps)
    if (horizon := last["horizon"]) is None:
        result.miss(
            f"Accelerate steps {last['type']} {calls} times a step; whether its length was counted"
            " so cannot be seen"
        )
        return False
    if calls * steps > 1.05 * horizon + calls:
        result.find(
            Cause.SCHEDULE_SPEED,
            f"{last['type']} was stepped {calls} times for each optimizer step, and came to its end"
            f" (after {horizon}) in step {horizon // calls} of {steps}",
            line=last["line"],
        )
    return True


def _calls_between_steps(rank: Rank, optimizer: int, schedule: int) -> list[list[Row]]:
    between: list[list[Row]] = []
    for row in rank.rows:
        if row["kind"] == "step" and row["optimizer"] == optimizer:
            between.append([])
        elif row["kind"] == "schedule" and row["schedule"] == schedule and between:
            between[-1].append(row)
    return between[:-1] if between and not between[-1] else between


def _check_skipped(result: AreaResult, rank: Rank, optimizer: int) -> None:
    is_skipped = False
    for row in rank.of("step", "skipped_step", "schedule"):
        if row["optimizer"] != optimizer:
            continue
        if row["kind"] != "schedule":
            is_skipped = row["kind"] == "skipped_step"
        elif is_skipped:
            result.find(
                Cause.SCHEDULE_ON_SKIPPED_STEP,
                "the loss scale was too large, the optimizer's step was skipped, and the schedule"
                " was stepped",
                line=row["line"],
            )
