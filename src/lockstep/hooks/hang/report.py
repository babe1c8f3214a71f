"""Who holds a run up, from where its ranks stand. Pure, apart from reading the user's source for what a line stands under."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from lockstep.comm.active_calls import CollectiveCall
from lockstep.hooks.hang.snapshot import Frame, Place, line_of

Kind = Literal["missing", "differ", "between"]
"""Ranks do not come to where the others wait; all wait, in different calls; all wait in the same call."""
_OF_ONE_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
_IN_WORDS = {
    "waits": "waits",
    "runs": "runs Python code",
    "computes": "computes in native code",
    "sleeps": "is in a call that does not return",
}


@dataclass(frozen=True, slots=True)
class Hang:
    """A run that stands still."""

    kind: Kind
    ranks: tuple[int, ...]
    """At fault: the missing ones; those whose call is not the one of most; all."""
    summary: str
    """A line."""
    report: str
    """Lines: who is where."""


def judged(places: Mapping[int, Place], silent: Mapping[int, str]) -> Hang | None:
    """Return the reason why the run hangs; None if it may still make progress.

    `silent`: the ranks that did not say where they stand, with the reason in words.
    """
    working = [place for place in places.values() if place.doing != "waits"]
    is_waited_for = len(working) < len(places)
    late = [place for place in working if place.is_late and (is_waited_for or not place.is_first)]
    if late or silent:
        return _missing(places, late, silent)
    if working or not places:
        return None
    calls = {_kind_of(place.call) for place in places.values()}
    return _same_call(places) if len(calls) == 1 and None not in calls else _different_calls(places)


def _missing(places: Mapping[int, Place], late: Sequence[Place], silent: Mapping[int, str]) -> Hang:
    ranks = tuple(sorted({place.rank for place in late} | silent.keys()))
    alone = len(places) + len(silent) == 1
    others = [place for place in places.values() if place.rank not in ranks]
    what = {place.rank: f"it {_standing(place)}" for place in late} | dict(silent)
    said = next(iter(what.values())) if len(what) == 1 else "; ".join(f"rank {rank}: {text}" for rank, text in sorted(what.items()))
    lines = [line for place in late for line in [*_where(place), *_stack(place)]]
    lines += [f"rank {rank}: {reason}" for rank, reason in silent.items()]
    head = "it stands still" if alone else f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} waited for"
    return Hang("missing", ranks, f"{head}: {said}", "\n".join([*lines, *_waiting(others)]))


def _same_call(places: Mapping[int, Place]) -> Hang:
    call = next(iter(places.values())).call
    text = f"all ranks wait in {call}: what one sends does not reach the others; look at the network between their machines"
    return Hang("between", tuple(places), text, "\n".join(_waiting(list(places.values()))))


def _different_calls(places: Mapping[int, Place]) -> Hang:
    groups = _by_call(list(places.values()))
    few = groups[-1]
    ranks = tuple(place.rank for place in few)
    said = "; ".join(f"{_ranks([place.rank for place in group])} in {_call(group[0])} at {group[0].line}" for group in groups)
    lines = _waiting(list(places.values()))
    for group in groups:
        if (line := group[0].line) is not None and line.is_the_users:
            lines += [f"the call at {line} stands under {what}" for what in enclosing(line)]
    lines.append(
        "every rank must make the same calls in the same order: a condition on the rank, or an exception that was swallowed, skips one"
    )
    return Hang("differ", ranks, f"ranks wait in different calls: {said}", "\n".join(lines))


def _kind_of(call: CollectiveCall | None) -> tuple[object, ...] | None:
    """The properties of a call that must be the same on all ranks in it."""
    if call is None:
        return None
    return call.name, call.group, call.sequence, call.tensors if call.name in _OF_ONE_SIZE else None


def _by_call(places: Sequence[Place]) -> list[list[Place]]:
    """Those that are in the same call, the many first."""

    def key(place: Place) -> str:
        return repr(_kind_of(place.call)) if place.call is not None else str(place.line)

    groups = [list(group) for _, group in groupby(sorted(places, key=key), key)]
    return sorted(groups, key=lambda group: (-len(group), group[0].rank))


def _waiting(places: Sequence[Place]) -> list[str]:
    lines: list[str] = []
    for group in _by_call(places):
        first = group[0]
        verb = "wait" if len(group) > 1 else "waits"
        ranks, since = _ranks([place.rank for place in group]), f"since {first.seconds:.0f} s, step {first.step}, {first.phase}"
        lines.append(f"{ranks} {verb} in {_call(first)} {since}")
        lines += _stack(first)
    return lines


def _call(place: Place) -> str:
    if place.call is None:
        return str(place.stack[-1]) if place.stack else "nothing known"
    number = f", call {place.call.sequence} of {place.call.group}" if place.call.sequence else ""
    return f"{place.call}{number}"


def _standing(place: Place) -> str:
    """A sentence on what the rank does, and in which line."""
    workers = {process: line for process, frames in place.children.items() if (line := line_of(frames)) is not None and line.is_the_users}
    if place.phase == "data" and workers:
        return "waits for loader workers: " + "; ".join(f"process {process} stands at {line}" for process, line in workers.items())
    return f"{_IN_WORDS[place.doing]} at {place.line}"


def _where(place: Place) -> Iterator[str]:
    yield (
        f"rank {place.rank} ({place.host}, process {place.process}) {_IN_WORDS[place.doing]} since {place.seconds:.0f} s, "
        f"step {place.step}, {place.phase}, which may take {place.limit_seconds:.0f} s"
    )


def _stack(place: Place) -> list[str]:
    """The user's own frames, the innermost first; and the innermost of all."""
    frames = [frame for frame in reversed(place.stack) if frame.is_the_users]
    innermost = place.stack[-1:] if place.stack and place.stack[-1] not in frames else ()
    return [f"    {frame}" for frame in [*innermost, *frames]]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def enclosing(frame: Frame) -> list[str]:
    """The conditions and `try` blocks of the function that a line stands under, the innermost first."""
    try:
        source = Path(frame.file).read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError):
        return []
    lines = source.splitlines()
    found: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node.lineno <= frame.line <= (node.end_lineno or 0):
            found.clear()  # what stands around a function is not what it is called under
        if isinstance(node, ast.If | ast.Try | ast.While | ast.For) and node.lineno < frame.line <= (node.end_lineno or 0):
            found.append(node.lineno)
    return [f"{lines[number - 1].strip()!r} (line {number})" for number in sorted(set(found), reverse=True)]
