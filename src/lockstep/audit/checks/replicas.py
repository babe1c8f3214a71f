"""Checks that all ranks hold the same model: parameters, optimizer states, buffers, running
statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.checks.gradients import factors
from lockstep.audit.finding import Area
from lockstep.audit.records import Records
from lockstep.audit.remedies import Cause
from lockstep.base.errors import first_few
from lockstep.evidence.rows import Row
from lockstep.evidence.tensors import finite_projection, sketch_difference

DRIFT = 1e-5
"""Relative difference of replicas that is more than rounding."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _seed_line(records: Records) -> str:
    """The line that set another seed on each rank before the first step; empty if none did."""
    seeds = [
        {row["line"]: row["seed"] for row in rank.of("seed") if row["step"] == 0}
        for rank in records.ranks
    ]
    return next(
        (
            line
            for line, seed in seeds[0].items()
            if any(each.get(line, seed) != seed for each in seeds)
        ),
        "",
    )


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
    own = _own_parameters(records, steps)
    for rows in steps:
        _check_step(result, rows, own, _seed_line(records))
    _check_statistics(result, records)
    if not any(row.get("broadcast_buffers") for rank in records.ranks for row in rank.of("ddp")):
        for rows in steps:
            _check_buffers(result, rows, _wrap_line(records))
    names, others = _compared(steps, own)
    if names:
        result.right = (
            f"{len(names)} parameters are the same on all ranks after each of {len(steps)} steps"
        )
    if others:
        result.miss(
            f"{len(others)} parameters are sharded, or NaN, or not on all ranks:"
            f" {first_few(others)}"
        )
    if own:
        result.miss(
            f"{len(own)} parameters belong to one rank each (experts): {first_few(sorted(own))}"
        )
    _check_element_wise(result, steps)
    return result


def _own_parameters(records: Records, steps: Sequence[Sequence[Row]]) -> set[str]:
    """Parameters that are meant to differ: they do from the beginning, are not reduced, and ranks
    exchange tokens."""
    if not any(
        row["name"].startswith("all_to_all")
        for rank in records.ranks
        for row in rank.of("collective")
    ):
        return set()
    first = steps[0]
    different = {name for name in first[0]["before"] if _worst(first, "before", [name])[0] > DRIFT}
    found = {name: factors(first, 0, [name]) for name in different}
    return {
        name for name, each in found.items() if each is None or not each.fits or each.is_own_only(0)
    }


def _compared(steps: Sequence[Sequence[Row]], own: set[str]) -> tuple[list[str], list[str]]:
    found: dict[str, bool] = {}
    for rows in steps:
        for name in dict.fromkeys(
            name for row in rows for name in row["parameters"] if name not in own
        ):
            sketches = [row["parameters"].get(name) for row in rows]
            is_seen = name not in rows[0]["sharded"] and all(
                finite_projection(each) is not None for each in sketches
            )
            found[name] = found.get(name, True) and is_seen
    return [name for name, is_seen in found.items() if is_seen], [
        name for name, is_seen in found.items() if not is_seen
    ]


def _check_step(result: AreaResult, rows: Sequence[Row], own: set[str], seed_line: str) -> None:
    step, line = rows[0]["index"], rows[0]["line"]
    names = [
        name for name in rows[0]["parameters"] if name not in rows[0]["sharded"] and name not in own
    ]
    if step == 0:
        worst, name = _worst(rows, "before", names)
        if worst > DRIFT:
            result.find(
                Cause.INITIAL_VALUES_DIFFER,
                f"before the first step {name} differs by {worst:.2g} of its size from rank to"
                " rank",
                line=seed_line or rows[0]["made_at"] or line,
                step=step,
                names=[name],
            )
    worst, name = _worst(rows, "parameters", names)
    if worst <= DRIFT or result.findings:
        return
    if len({str(row["lr"]) for row in rows}) > 1:
        return  # said by the check of learning rates
    state, state_name = _worst(rows, "states", rows[0]["states"])
    gradient, _ = _worst(rows, "applied", names)
    if gradient <= DRIFT and state > DRIFT:
        result.find_at(
            rows[0],
            Cause.OPTIMIZER_STATE_DIFFERS,
            f"the gradients agree, and the optimizer's {state_name} differs by"
            f" {state:.2g} of its size",
            line=line,
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


def _check_statistics(result: AreaResult, records: Records) -> None:
    by_rank = [_statistics(rank.of("statistics")) for rank in records.ranks]
    # before the next forward that reduces
    are_sent = any(row.get("broadcast_buffers") for row in records.ranks[0].of("ddp"))
    for key in by_rank[0]:
        rows = [each.get(key) for each in by_rank]
        for others in zip(*[each or [] for each in rows], strict=False):
            worst = max(
                sketch_difference(one, other)
                for each in others[1:]
                for one, other in zip(others[0]["sketches"], each["sketches"], strict=False)
            )
            if worst > 1e-4 and not (are_sent and others[0]["training"]):
                where = "in an evaluation" if not others[0]["training"] else "in training"
                result.find(
                    Cause.BUFFERS_DIFFER,
                    f"{where} BatchNorm's running statistics differ by {worst:.2g} of their size"
                    " from rank to rank",
                    line=_wrap_line(records) or others[0]["line"],
                )


def _statistics(rows: Iterable[Row]) -> dict[tuple[object, ...], list[Row]]:
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(
            (row["loader"], row["number"], row["training"], row["grad"], row["call"]), []
        ).append(row)
    return found


def _wrap_line(records: Records) -> str:
    """The line that wrapped a model without its buffers being sent to all ranks; empty if none
    did."""
    return next(
        (str(row["line"]) for row in records.ranks[0].of("ddp") if not row["broadcast_buffers"]), ""
    )


def _check_buffers(result: AreaResult, rows: Sequence[Row], line: str) -> None:
    names = [name for name in rows[0]["buffers"] if name.rpartition(".")[2] not in STATISTICS]
    worst, name = _worst(rows, "buffers", names)
    if worst > DRIFT:
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
            result.find(
                Cause.OPTIMIZER_NEEDS_WHOLE_TENSORS,
                f"{rows[0]['type']} updates an element by the other elements of its tensor, and"
                f" {len(rows[0]['sharded'])} of them are sharded: {first_few(rows[0]['sharded'])}",
                line=rows[0]["line"],
                step=rows[0]["index"],
                names=list(rows[0]["sharded"]),
            )


def _worst(rows: Sequence[Row], kind: str, names: Iterable[str]) -> tuple[float, str]:
    """The largest relative difference between rank 0 and another one, and the tensor that it is
    in."""
    found = [
        (sketch_difference(rows[0][kind].get(name), row[kind][name]), name)
        for name in names
        for row in rows[1:]
        if name in row[kind] and rows[0][kind].get(name) is not None and row[kind][name] is not None
    ]
    return max(found, default=(0.0, ""))
