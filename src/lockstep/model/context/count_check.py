"""Checks that the counts of tokens that a forward reads into Python do not change the model's
output. Only counts that differ between ranks are checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.assignment import contiguous_range
from lockstep.base.errors import RecipeError
from lockstep.comm.world import World
from lockstep.model.context.chunk_axis import ChunkAxis
from lockstep.model.context.count_reads import (
    CountsByPlace,
    DifferentCounts,
    KnownCounts,
    StepCounts,
    differing_lines,
    first_different_counts,
    noted_from_json,
    noted_to_json,
)
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.proof import gather_over


class TriedGroup(NamedTuple):
    """The result of computing a group of tokens twice. All tokens are computed once on one rank,
    and once divided among ranks or chunks."""

    differences: Sequence[tuple[float, float]]
    """Has one item for each of this rank's chunks. The first number is the relative difference
    between the two outputs. The second number is the relative difference that rounding explains."""
    noted: CountsByPlace


@dataclass(frozen=True, slots=True)
class TriedTokens:
    """The tokens of a microbatch in groups. Each group can be computed twice."""

    layout: TokenLayout
    groups: int
    compute: Callable[[int], TriedGroup]
    """Computes one group twice. Every rank must call this function."""


def check_counts(
    step: StepCounts,
    known: KnownCounts,
    tokens_of: Callable[[Any], TriedTokens],
    worlds: Sequence[World],
) -> None:
    """Compute the first microbatch of a step again if its ranks have read different counts of
    tokens. Every rank of `worlds` must call this function. All ranks raise the same error."""
    mine = [[microbatch, noted_to_json(noted)] for microbatch, noted in step.noted.items()]
    everyone = gather_over(mine, worlds)
    difference = first_different_counts(
        [
            {microbatch: noted_from_json(noted) for microbatch, noted in theirs}
            for theirs in everyone
        ]
    )
    if difference is None:  # the counts differ in a microbatch that is not kept
        return
    kept = step.arguments[: difference.microbatch + 1]
    tokens = tokens_of(kept[-1]) if kept else None
    groups = max(gather_over(0 if tokens is None else tokens.groups, worlds))
    tried: list[TriedGroup] = []
    if tokens is not None:
        # forwards may have collectives with ranks whose microbatch has more groups
        tried = [tokens.compute(min(group, tokens.groups - 1)) for group in range(groups)]
    pairs = [pair for each in tried for pair in each.differences]
    shown: dict[str, None] = {}
    own = [pairs, [noted_to_json(each.noted) for each in tried]]
    gathered = gather_over(own, worlds)
    for group in range(groups):
        noted = noted_from_json(row for _, theirs in gathered if theirs for row in theirs[group])
        shown.update(dict.fromkeys(differing_lines(noted)))
    errors = [tuple(pair) for theirs, _ in gathered for pair in theirs]
    if wrong := [pair for pair in errors if not pair[0] <= pair[1]]:
        words = [] if tokens is None else [_words_for(tokens.layout)]
        raise _error(difference, shown, wrong, *next(filter(None, gather_over(words, worlds)))[0])
    for line, counts in difference.lines.items():
        known.add(line, counts.values(), is_shown=line in shown)


def _words_for(layout: TokenLayout) -> list[str]:
    is_chunked = isinstance(layout.world, ChunkAxis)
    return [layout.cut_by, "chunk" if is_chunked else "rank", layout.otherwise]


def _error(
    difference: DifferentCounts,
    shown: Iterable[str],
    wrong: Iterable[tuple[float, ...]],
    cut_by: str,
    kind: str,
    otherwise: str,
) -> RecipeError:
    lines = [each for each in shown if each in difference.lines] or [*difference.lines]
    counts = difference.lines[lines[0]]
    first, *others = counts
    other = next((each for each in others if counts[each] != counts[first]), None)
    read = f"gives {counts[first].text} on {kind} {first.part} and " + (
        f"nothing new on the other {kind}s"
        if other is None
        else f"{counts[other].text} on {kind} {other.part}"
    )
    error, allowed = max(wrong, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
    return RecipeError(
        f"under {cut_by} a count, or an array, of some of the tokens changes what the model"
        f" computes: {lines[0]}, {read}; the output for some tokens differs by {error:.1g} of its"
        f" size from that of one process, where rounding explains {allowed:.1g}; decide for each"
        " token by itself (torch.where); use a count only to leave out what no token has chosen;"
        f" or {otherwise}"
    )


def short_rows(tokens: int, chunks: int, width: int) -> list[list[int]]:
    if tokens <= chunks * width:
        return [[*range(tokens)]]
    spans = [contiguous_range(tokens, chunk, chunks) for chunk in range(chunks)]
    starts = range(0, max(map(len, spans)), width)
    return [
        [place for span in spans for place in span[min(start, len(span) - width) :][:width]]
        for start in starts
    ]
