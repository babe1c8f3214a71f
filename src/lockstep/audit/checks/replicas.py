"""Checks that all ranks have the same parameters, optimizer states, buffers and running
statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.audit.finding import Area, AreaResult, Cause
from lockstep.audit.records import Records, first_line
from lockstep.base.errors import first_few
from lockstep.evidence.rows import Row
from lockstep.evidence.tensors import BATCHNORM_BUFFERS, finite_projection, sketch_difference

DRIFT_TOLERANCE = 1e-5


def check_replicas(records: Records) -> AreaResult:
    result = AreaResult(Area.REPLICAS)
    steps = list(records.together())
    if records.world_size < 2 or not steps:
        if records.steps:
            result.miss(
                "one process has no replica"
                if records.world_size < 2
                else "the ranks took no step together"
            )
        return result
    for rows in steps:
        _check_step(result, rows, _seed_line(records))
    wrapped = [row for rank in records.ranks for row in rank.of("ddp")]
    # the line that wrapped a model whose buffers are not sent to all ranks
    line = first_line(row for row in records.ranks[0].of("ddp") if not row["broadcast_buffers"])
    _check_statistics(result, records, line)
    if not any(row.get("broadcast_buffers") for row in wrapped):
        for rows in steps:
            _check_buffers(result, rows, line)
    _say_compared(result, steps)
    _check_element_wise(result, steps)
    return result


def _seed_line(records: Records) -> str:
    first, *others = [
        {row["line"]: row["seed"] for row in rank.of("seed") if row["step"] == 0}
        for rank in records.ranks
    ]
    lines = (
        line for line, seed in first.items() if any(each.get(line, seed) != seed for each in others)
    )
    return next(lines, "")


def _say_compared(result: AreaResult, steps: Sequence[Sequence[Row]]) -> None:
    is_seen: dict[str, bool] = {}
    for rows in steps:
        names = dict.fromkeys(name for row in rows for name in row["parameters"])
        for name in names:
            sketches = [finite_projection(row["parameters"].get(name)) for row in rows]
            whole = name not in rows[0]["sharded"] and all(each is not None for each in sketches)
            is_seen[name] = is_seen.get(name, True) and whole
    others = [name for name, seen in is_seen.items() if not seen]
    if len(is_seen) > len(others):
        result.right = (
            f"{len(is_seen) - len(others)} parameters are the same on all ranks after each of"
            f" {len(steps)} steps"
        )
    if others:
        result.miss(
            f"{len(others)} parameters are sharded, or NaN, or not on all ranks:"
            f" {first_few(others)}"
        )


def _check_step(result: AreaResult, rows: Sequence[Row], seed_line: str) -> None:
    first = rows[0]
    step, line = first["index"], first["line"]
    names = [name for name in first["parameters"] if name not in first["sharded"]]
    if step == 0:
        worst, name = _worst(rows, "before", names)
        if worst > DRIFT_TOLERANCE:
            result.find(
                Cause.INITIAL_VALUES_DIFFER,
                f"before the first step {name} differs by {worst:.2g} of its size from rank to"
                " rank",
                line=seed_line or first["made_at"] or line,
                step=step,
                names=[name],
            )
    worst, name = _worst(rows, "parameters", names)
    if worst <= DRIFT_TOLERANCE or result.findings or len({str(row["lr"]) for row in rows}) > 1:
        return  # the check of schedules finds different learning rates
    state, state_name = _worst(rows, "states", first["states"])
    if state > DRIFT_TOLERANCE and _worst(rows, "applied", names)[0] <= DRIFT_TOLERANCE:
        result.find(
            Cause.OPTIMIZER_STATE_DIFFERS,
            f"the gradients agree, and the optimizer's {state_name} differs by {state:.2g} of its"
            " size",
            first,
            names=[state_name],
        )
        return
    result.find(
        Cause.REPLICAS_DRIFT,
        f"after step {step} {name} differs by {worst:.2g} of its size from rank to rank",
        line=line,
        step=step,
        names=[name],
    )


def _check_statistics(result: AreaResult, records: Records, line: str) -> None:
    by_rank = [_statistics(rank.of("statistics")) for rank in records.ranks]
    # DDP broadcasts buffers at the beginning of a forward
    are_sent = any(row.get("broadcast_buffers") for row in records.ranks[0].of("ddp"))
    for key in by_rank[0]:
        for first, *others in zip(*[each.get(key, []) for each in by_rank], strict=False):
            worst = max(
                sketch_difference(one, other)
                for each in others
                for one, other in zip(first["sketches"], each["sketches"], strict=False)
            )
            if worst > 1e-4 and not (are_sent and first["training"]):
                where = "in training" if first["training"] else "in an evaluation"
                result.find(
                    Cause.BUFFERS_DIFFER,
                    f"{where} BatchNorm's running statistics differ by {worst:.2g} of their size"
                    " from rank to rank",
                    line=line or first["line"],
                )


def _statistics(rows: Iterable[Row]) -> dict[tuple[object, ...], list[Row]]:
    statistics: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("loader", "number", "training", "grad", "call"))
        statistics.setdefault(key, []).append(row)
    return statistics


def _check_buffers(result: AreaResult, rows: Sequence[Row], line: str) -> None:
    names = [
        name for name in rows[0]["buffers"] if name.rpartition(".")[2] not in BATCHNORM_BUFFERS
    ]
    worst, name = _worst(rows, "buffers", names)
    if worst > DRIFT_TOLERANCE:
        step = rows[0]["index"]
        result.find(
            Cause.BUFFERS_DIFFER,
            f"after step {step} the buffer {name} differs by {worst:.2g} of its size from rank to"
            " rank",
            line=line or rows[0]["line"],
            step=step,
            names=[name],
        )


def _check_element_wise(result: AreaResult, steps: Sequence[Sequence[Row]]) -> None:
    for rows in steps:
        if any(row.get("shards_right") is False for row in rows):
            first = rows[0]
            result.find(
                Cause.OPTIMIZER_NEEDS_WHOLE_TENSORS,
                f"{first['type']} updates an element by the other elements of its tensor, and"
                f" {len(first['sharded'])} of them are sharded: {first_few(first['sharded'])}",
                line=first["line"],
                step=first["index"],
                names=list(first["sharded"]),
            )


def _worst(rows: Sequence[Row], kind: str, names: Iterable[str]) -> tuple[float, str]:
    found = [
        (sketch_difference(rows[0][kind].get(name), row[kind].get(name)), name)
        for name in names
        for row in rows[1:]
    ]
    return max(found, default=(0.0, ""))
