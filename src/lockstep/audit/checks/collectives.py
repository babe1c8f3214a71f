"""Checks that all ranks call collectives in the same order, and that only one rank writes each
file."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lockstep.audit.checks.samples import loader_passes
from lockstep.audit.finding import Area, AreaResult, Cause
from lockstep.audit.records import Rank, Records, first_line
from lockstep.evidence.rows import Row

_ERROR = re.compile(r"^(?:\[\w+\]:\s*)*[\w.]*(?:Error|Exception|Interrupt)\b.*$", re.MULTILINE)
_BROKEN = re.compile(
    r"gloo|connection|peer|nccl|process ?group|timed out|timeout|buffer size|size"
    r" mismatch|collective",
    re.IGNORECASE,
)
REDUCTION = "DistributedDataParallel's reduction of gradients"


def is_broken_collective(error: str) -> bool:
    errors = _ERROR.findall(error)
    return bool(errors) and all(_BROKEN.search(each) for each in errors)


def check_collectives(records: Records, *, hung: bool, error: str) -> AreaResult:
    result = AreaResult(Area.COLLECTIVES)
    failed = is_broken_collective(error)
    if records.world_size < 2:
        return result
    if records.joined_at < math.inf:
        result.miss(
            "under Join ranks take different numbers of steps: what they do there is not compared"
        )
        return result
    if hung or failed:
        _check_uneven(result, records)
    compared = 0 if result.findings else _check_order(result, records, broken=hung or failed)
    if failed and not result.findings:
        _check_left(result, records)
    if hung and not result.findings:
        waiting = [
            f"rank {rank.rank} after {len(rank.steps)} steps{', ended' if rank.has_ended else ''}"
            for rank in records.ranks
        ]
        text = f"the ranks wait: {'; '.join(waiting)}"
        result.find(Cause.HANG, text, line=_last_line(records.ranks[-1]))
    if compared:
        result.right = (
            f"{compared} collectives, of Python code and of DistributedDataParallel, in the same"
            " order on all ranks"
        )
    elif not result.findings:
        result.miss("no collective of Python code or of DistributedDataParallel was seen")
    return result


def check_files(records: Records) -> AreaResult:
    result = AreaResult(Area.FILES)
    writers: dict[str, dict[int, Row]] = {}
    for rank in records.ranks:
        for row in rank.of("save"):
            writers.setdefault(row["path"], {})[rank.rank] = row
    for path, rows in writers.items():
        if len(rows) > 1:
            text = f"ranks {', '.join(map(str, sorted(rows)))} wrote {path}"
            line = first_line(rows.values())
            result.find(Cause.SAVED_BY_EVERY_RANK, text, line=line, names=[path])
    if writers:
        result.right = f"files that were saved, each by one rank: {len(writers)}"
    elif records.steps:
        result.miss("no file was written by torch.save")
    return result


def _check_uneven(result: AreaResult, records: Records) -> None:
    for loader in loader_passes(records):
        for ranks in loader.passes if loader.is_training else ():
            counts = [each.batches for each in ranks]
            least = min(counts)
            if max(counts) > least and ranks[counts.index(least)].is_complete:
                result.find(
                    Cause.UNEVEN_INPUTS,
                    f"pass {ranks[0].begin['number']} over the training data has batches:"
                    f" {_on_ranks(records.ranks, counts)}",
                    line=loader.line,
                )


def _check_left(result: AreaResult, records: Records) -> None:
    counts = [len(rank.of("backward")) for rank in records.ranks]
    ended_early = [
        rank for rank, count in zip(records.ranks, counts, strict=True) if count < max(counts)
    ]
    if ended_early:
        result.find(
            Cause.RANK_LEFT,
            f"rank {', '.join(str(rank.rank) for rank in ended_early)} ended after"
            f" {len(ended_early[0].steps)} steps and {min(counts)} backwards; the others began"
            f" backward {max(counts)}, and its reduction failed without that rank",
            line=_last_line(ended_early[0]),
        )


def _check_order(result: AreaResult, records: Records, *, broken: bool) -> int:
    by_rank = {rank.rank: _collectives(rank) for rank in records.ranks}
    compared = 0
    for group in sorted({tuple(row["ranks"]) for rows in by_rank.values() for row in rows}):
        members = [rank for rank in records.ranks if rank.rank in group]
        calls = [
            [row for row in by_rank[rank.rank] if tuple(row["ranks"]) == group] for rank in members
        ]
        for number, rows in enumerate(zip(*calls, strict=False)):
            if len({_kind(row) for row in rows}) > 1:
                evidence, line = _mismatch(members, calls, number)
                result.find(Cause.COLLECTIVE_MISMATCH, evidence, line=line)
                return compared
            compared += len(rows) if len(rows) > 1 else 0
        counts = [len(each) for each in calls]
        if max(counts) != min(counts) and (broken or all(rank.has_ended for rank in members)):
            extra = calls[counts.index(max(counts))][min(counts)]
            result.find(
                Cause.COLLECTIVE_MISMATCH,
                f"the ranks called different numbers of collectives ({_on_ranks(members, counts)});"
                f" the first that not all called: {_text(extra)}",
                line=extra["line"],
            )
            return compared
    return compared


def _on_ranks(ranks: Sequence[Rank], counts: Sequence[int]) -> str:
    return ", ".join(f"{n} on rank {rank.rank}" for rank, n in zip(ranks, counts, strict=False))


def _collectives(rank: Rank) -> list[Row]:
    calls: list[Row] = []
    waiting: dict[int, Row] = {}
    for row in rank.of("collective", "ddp_forward", "backward"):
        if row["kind"] == "collective":
            calls.append(row)
        elif row["kind"] == "ddp_forward":
            waiting.pop(row["wrapper"], None)
            if row["reduces"]:
                waiting[row["wrapper"]] = row
        else:
            reduction = {"name": REDUCTION, "shape": [], "operation": "", "line": row["line"]}
            calls += [reduction | {"ranks": each["ranks"]} for each in waiting.values()]
            waiting.clear()
    return calls


def _mismatch(
    members: Sequence[Rank], calls: Sequence[Sequence[Row]], number: int
) -> tuple[str, str]:
    rows = [each[number] for each in calls]
    text = f"collective {number + 1}: {_texts(members, rows)}"
    kinds = Counter(map(_kind, rows))
    rare = min(
        range(len(rows)), key=lambda n: (kinds[_kind(rows[n])], rows[n]["name"] == REDUCTION)
    )
    before = [each[number - 1] for each in calls] if number else []
    if len({row["line"] for row in before}) > 1:
        return f"{text}; before it: {_texts(members, before)}", str(before[rare]["line"])
    return text, str(rows[rare]["line"])


def _texts(members: Sequence[Rank], rows: Sequence[Row]) -> str:
    return ", ".join(
        f"rank {rank.rank} {_text(row)}" for rank, row in zip(members, rows, strict=True)
    )


def _kind(row: Row) -> tuple[Any, ...]:
    return row["name"], str(row["shape"]), row["operation"]


def _text(row: Row) -> str:
    shape = f" of {'x'.join(map(str, row['shape'][0])) or 'a number'}" if row["shape"] else ""
    line = f" at line {row['line'].rpartition(':')[2]}" if row["line"] else ""
    return f"{row['name']}{shape}{line}"


def _last_line(rank: Rank) -> str:
    return first_line(row for row in reversed(rank.rows) if row.get("line"))
