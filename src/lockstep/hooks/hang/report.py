"""Finds the ranks that make a run hang, from the stack snapshots of all ranks."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from lockstep.base.words import listed
from lockstep.comm.active_calls import CollectiveCall
from lockstep.hooks.hang.snapshot import Frame, StackSnapshot, innermost_line
from lockstep.model.shard import error_of_order
from lockstep.training.reducers.exchange_order import first_different_exchange

Kind = Literal["missing", "differ", "between", "order"]
"""The kind of a hang. `missing`: some ranks do not reach a collective. `differ`: all ranks wait, in
different collectives. `between`: all ranks wait in the same collective. `order`: ranks exchange the
shards of different blocks of the model."""
_SAME_SHAPE_ON_ALL_RANKS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
_IN_WORDS = {
    "waits": "waits",
    "runs": "runs Python code",
    "computes": "computes in native code",
    "sleeps": "is in a call that does not return",
}


@dataclass(frozen=True, slots=True)
class Hang:
    kind: Kind
    ranks: tuple[int, ...]  # at fault
    summary: str  # one line
    report: str  # lines about each rank


def different_exchanges(snapshots: Mapping[int, StackSnapshot]) -> Hang | None:
    """Return the hang of ranks that exchange the shards of different blocks of the model. Ranks
    that exchange different blocks hang forever, even if no rank has waited for long."""
    everyone = [snapshots[rank] for rank in sorted(snapshots)]
    calls = first_different_exchange(
        [exchanges for each in everyone for exchanges in each.exchanges]
    )
    if calls is None:
        return None
    ranks = tuple(each.rank for each in everyone if each.exchanges)
    lines = [line for each in everyone for line in _exchanging(each)]
    return Hang("order", ranks, str(error_of_order(calls)), "\n".join(lines))


def _exchanging(snapshot: StackSnapshot) -> list[str]:
    if not snapshot.exchanges:
        return []
    latest = f"rank {snapshot.rank} {snapshot.exchanges[-1].latest}"
    return [latest, *_stack(snapshot)]


def diagnose_hang(snapshots: Mapping[int, StackSnapshot], silent: Mapping[int, str]) -> Hang | None:
    """Return None if the run may still progress. `silent` has the reason for each rank without a
    snapshot."""
    everyone = list(snapshots.values())
    working = [each for each in everyone if each.activity != "waits"]
    is_waited_for = len(working) < len(everyone)
    late = [each for each in working if each.is_late and (is_waited_for or not each.is_first)]
    if late or silent:
        return _missing(everyone, late, silent)
    if working or not everyone:
        return None
    if len({_kind_of(each.call) for each in everyone}) > 1 or everyone[0].call is None:
        return _different_calls(everyone)
    text = (
        f"all ranks wait in {everyone[0].call}: the data that one sends does not reach the others;"
        " check the network between their hosts"
    )
    lines = [*_waiting(everyone), *_latest_exchanges(everyone)]
    return Hang("between", tuple(snapshots), text, "\n".join(lines))


def _missing(
    everyone: Sequence[StackSnapshot], late: Sequence[StackSnapshot], silent: Mapping[int, str]
) -> Hang:
    reasons = {each.rank: f"it {_reason(each)}" for each in late} | dict(silent)
    reasons = dict(sorted(reasons.items()))
    ranks = tuple(reasons)
    texts = [f"rank {rank}: {text}" for rank, text in reasons.items()]
    lines = [line for each in late for line in [_late_line(each), *_stack(each)]]
    lines += [f"rank {rank}: {reason}" for rank, reason in silent.items()]
    lines += _waiting([each for each in everyone if each.rank not in ranks])
    lines += _latest_exchanges(everyone)
    head = f"{listed('rank', ranks)} {'is' if len(ranks) == 1 else 'are'} waited for"
    if len(everyone) + len(silent) == 1:
        head = "this process is late"
    text = reasons[ranks[0]] if len(ranks) == 1 else "; ".join(texts)
    return Hang("missing", ranks, f"{head}: {text}", "\n".join(lines))


def _different_calls(everyone: Sequence[StackSnapshot]) -> Hang:
    groups = _by_call(everyone)
    ranks = tuple(each.rank for each in groups[-1])
    texts = [
        f"{listed('rank', [each.rank for each in group])} in {_call(group[0])} at {group[0].line}"
        for group in groups
    ]
    lines = [*_waiting(everyone), *_latest_exchanges(everyone)]
    for group in groups:
        if (line := group[0].line) is not None and line.is_user_code:
            lines += [f"the call at {line} is inside {block}" for block in enclosing(line)]
    lines.append(
        "every rank must make the same calls in the same order: a condition on the rank, or an"
        " exception that was swallowed, skips one"
    )
    return Hang(
        "differ", ranks, f"ranks wait in different calls: {'; '.join(texts)}", "\n".join(lines)
    )


def _kind_of(call: CollectiveCall | None) -> tuple[object, ...] | None:
    if call is None:
        return None
    return (
        call.name,
        call.group,
        call.sequence,
        call.tensors if call.name in _SAME_SHAPE_ON_ALL_RANKS else None,
    )


def _by_call(snapshots: Sequence[StackSnapshot]) -> list[list[StackSnapshot]]:
    def key(each: StackSnapshot) -> str:
        return repr(_kind_of(each.call)) if each.call is not None else str(each.line)

    groups = [list(group) for _, group in groupby(sorted(snapshots, key=key), key)]
    return sorted(groups, key=lambda group: (-len(group), group[0].rank))


def _waiting(snapshots: Sequence[StackSnapshot]) -> list[str]:
    lines: list[str] = []
    for group in _by_call(snapshots):
        first, verb = group[0], "wait" if len(group) > 1 else "waits"
        ranks = listed("rank", [each.rank for each in group])
        since = f"since {first.seconds:.0f} s, after step {first.step}, {first.phase}"
        lines += [f"{ranks} {verb} in {_call(first)} {since}", *_stack(first)]
    return lines


def _latest_exchanges(snapshots: Sequence[StackSnapshot]) -> list[str]:
    return [
        f"rank {each.rank}'s latest exchange: it {each.exchanges[-1].latest}"
        for each in snapshots
        if each.exchanges
    ]


def _call(snapshot: StackSnapshot) -> str:
    call = snapshot.call
    if call is None:
        return str(snapshot.stack[-1]) if snapshot.stack else "an unknown call"
    return f"{call}, call {call.sequence} of {call.group}" if call.sequence else str(call)


def _reason(late: StackSnapshot) -> str:
    lines = {process: innermost_line(frames) for process, frames in late.children.items()}
    workers = [
        f"process {process} is at {line}"
        for process, line in lines.items()
        if line is not None and line.is_user_code
    ]
    if late.phase == "data" and workers:
        return f"waits for loader workers: {'; '.join(workers)}"
    return f"{_IN_WORDS[late.activity]} at {late.line}"


def _late_line(late: StackSnapshot) -> str:
    return (
        f"rank {late.rank} ({late.host}, process {late.process}) {_IN_WORDS[late.activity]} since"
        f" {late.seconds:.0f} s, after step {late.step}, {late.phase}, which may take"
        f" {late.limit_seconds:.0f} s"
    )


def _stack(snapshot: StackSnapshot) -> list[str]:
    frames = [frame for frame in reversed(snapshot.stack) if frame.is_user_code]
    innermost = snapshot.stack[-1:] if snapshot.stack and snapshot.stack[-1] not in frames else ()
    return [f"    {frame}" for frame in [*innermost, *frames]]


def enclosing(frame: Frame) -> list[str]:
    """Return the `if`, `try`, `while` and `for` statements around the frame's line, innermost
    first."""
    try:
        source = Path(frame.file).read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError):
        return []
    lines = source.splitlines()
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt | ast.expr) or not (
            node.lineno <= frame.line <= (node.end_lineno or 0)
        ):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            numbers.clear()  # the statements around a function's definition
        if isinstance(node, ast.If | ast.Try | ast.While | ast.For) and node.lineno < frame.line:
            numbers.add(node.lineno)
    return [
        f"{lines[number - 1].strip()!r} (line {number})" for number in sorted(numbers, reverse=True)
    ]
