"""The counts that a forward reads on the host, and their check by value."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import ALONE

from lockstep.base.errors import RecipeError
from lockstep.comm.world import World
from lockstep.model.context.count_check import TriedGroup, TriedTokens, check_counts, short_rows
from lockstep.model.context.count_reads import (
    MOST_CHECKS,
    MOST_KEPT_BYTES,
    CountReads,
    Counts,
    KnownCounts,
    PartCounts,
    Place,
)
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.host_reads import Noting, PartReads
from lockstep.sequence import chunks_of

LAYOUTS = [TokenLayout(12, 2, cast(World, SimpleNamespace(rank=r, size=2))) for r in range(2)]

NOTED: dict[str, Callable[[Tensor], Any]] = {
    "any": lambda x: bool((x > 0).any()),
    "all": lambda x: bool((x > -0.9).all()),
    "item": lambda x: (x > 0).sum().item(),
    "in": lambda x: 0.5 in x,
    "numpy": lambda x: x.numpy().max(),
    "array": lambda x: np.asarray(x).max(),
    "list": lambda x: max(x.flatten().tolist()),
    "nonzero": lambda x: len((x > 0).nonzero()),
    "nonzero as tuple": lambda x: len(torch.nonzero(x > 0, as_tuple=True)[0]),
    "where": lambda x: len(torch.where(x > 0)[0]),
    "index": lambda x: x[x > 0].shape,
    "index of a dim": lambda x: x[x[:, 0] > 0, :2].shape,
    "unique": lambda x: len(x.unique()),
    "masked_select": lambda x: x.masked_select(x > 0).numel(),
}


@pytest.mark.parametrize("name", NOTED)
def test_counts_are_noted_with_their_line_until_they_are_known(name: str) -> None:
    known = KnownCounts()
    parts = []
    for tokens in (torch.tensor([[0.5, 1.0], [2.0, -1.0]]), torch.full((2, 2), -0.5)):
        part = PartReads(PartCounts(known))
        with Noting(part):
            NOTED[name](tokens)
        assert not part.reads
        assert part.counts is not None
        parts.append(part.counts.by_line())
    one, other = parts
    (line,) = one
    assert line.startswith("test_count_reads.py, line ")
    assert one != other
    known.add(line, [*one.values(), *other.values()], is_shown=True)
    part = PartReads(PartCounts(known))
    with Noting(part):
        NOTED[name](tokens)
    assert part.counts is not None
    assert not part.counts.by_line()


@pytest.mark.parametrize("value", [math.nan, [1.0, math.nan], np.array([math.nan])])
def test_nothing_known_has_nan(value: Any) -> None:
    known = KnownCounts()
    known.add("line", [Counts(-9.0, 9.0, "")], is_shown=True)
    part = PartCounts(known)
    part.note("line", [])
    assert not part.by_line()
    part.note("line", value)
    assert part.by_line()["line"].high == math.inf


def test_counts_are_known_in_the_range_that_was_shown() -> None:
    known = KnownCounts()
    for checks in range(1, MOST_CHECKS):
        known.add("shown", [Counts(2.0, 2.0, "a"), Counts(5.0, 7.0, "b")], is_shown=True)
        known.add("hidden", [Counts(2.0, 2.0, "a")], is_shown=False)
        assert known.has("shown", 3.0, 7.0), checks
        assert not known.has("shown", 3.0, 8.0)
        assert not known.has("hidden", 2.0, 2.0)
        assert not known.has("another", 2.0, 2.0)
    for line in ("shown", "hidden"):
        known.add(line, [], is_shown=False)
        assert known.has(line, -1e9, 1e9)


@pytest.mark.parametrize(
    ("tokens", "chunks", "width"), [(12, 4, 8), (32, 4, 8), (33, 4, 8), (101, 3, 8), (40, 4, 2)]
)
def test_rows_have_all_tokens_each_in_its_chunk(tokens: int, chunks: int, width: int) -> None:
    rows = short_rows(tokens, chunks, width)
    assert {place for row in rows for place in row} == set(range(tokens))
    assert len({len(row) for row in rows}) == 1
    assert all(row == sorted(row) for row in rows)
    for ranks in (1, chunks // 2):

        def owners(of: int, ranks: int = ranks) -> dict[int, int]:
            layouts = [
                TokenLayout(of, chunks, cast(World, SimpleNamespace(rank=rank, size=ranks)))
                for rank in range(ranks)
            ]
            return {
                place: layout.world.rank
                for layout in layouts
                for chunk, span in zip(
                    chunks_of(chunks, ranks, layout.world.rank) if ranks > 1 else range(chunks),
                    layout.own_spans,
                    strict=True,
                )
                for place in span
            }

        short, whole = owners(len(rows[0])), owners(tokens)
        for row in rows:
            assert [whole[place] for place in row] == [short[each] for each in range(len(row))]


def read(counts: CountReads, step: list[list[dict[str, int]]]) -> None:
    """Read some counts. `step`: microbatch -> rank -> line -> count."""
    for number, microbatch in enumerate(step):
        counts.begin_microbatch(torch.tensor([number]))
        for layout, lines in zip(LAYOUTS, microbatch, strict=True):
            part = PartCounts(counts.known)
            for line, count in lines.items():
                part.note(line, count)
            counts.end_part(number, layout, part)


def of_two_ranks() -> CountReads:
    counts = CountReads(ALONE, is_summed=True)
    counts.ranks = [0, 1]
    return counts


def test_the_first_microbatch_that_differs_is_checked_and_then_known() -> None:
    counts, computed = of_two_ranks(), []

    def tokens_of(arguments: Tensor) -> TriedTokens:
        def compute(group: int) -> TriedGroup:
            computed.append((int(arguments), group))
            read = {
                Place(0, group, part, 2): {"b": Counts(part, part, str(part))} for part in (0, 1)
            }
            return TriedGroup([(1e-9, 1e-6)], read)

        return TriedTokens(LAYOUTS[0], 2, compute)

    def check() -> list[tuple[int, int]]:
        computed.clear()
        if any(counts.numbers()):
            counts.end_step()
            check_counts(counts.latest, counts.known, tokens_of, [ALONE])
        counts.end_step()
        return list(computed)

    same, other = [{"a": 1}, {"a": 1}], [{"a": 1, "b": 3}, {"a": 1, "b": 0}]
    read(counts, [same, same])
    assert not check()
    read(counts, [same, other, other])
    assert check() == [(1, 0), (1, 1)]
    read(counts, [same, other])
    assert not check(), "known"
    read(counts, [[{"b": 4}, {"b": 0}]])
    assert check(), "more than known"
    read(counts, [[{"b": 4}, {}]])
    assert not check()
    read(counts, [[{"c": 0}, {}]])
    assert check(), "one rank does not come to the line"


def test_other_results_are_refused_with_the_counts() -> None:
    counts = of_two_ranks()
    read(counts, [[{"a": 1, "b": 3}, {"a": 1, "b": 0}]])
    counts.end_step()
    for error in (0.5, math.nan):
        tried = TriedGroup([(error, 1e-6)], {})
        tokens = TriedTokens(LAYOUTS[0], 1, partial(_answer, tried))
        with pytest.raises(RecipeError, match=r"b, gives 3 on rank 0 and 0 on rank 1.*differs by"):
            check_counts(counts.latest, counts.known, partial(_answer, tokens), [ALONE])


def _answer(found: Any, _: Any) -> Any:
    return found


def test_few_bytes_of_a_step_are_kept() -> None:
    counts = of_two_ranks()
    large = torch.empty(MOST_KEPT_BYTES - 8, dtype=torch.uint8, device="meta")
    for arguments in (large, torch.zeros(1), torch.zeros(2), torch.zeros(1)):
        counts.begin_microbatch(arguments)
    counts.end_step()
    assert len(counts.latest.arguments) == 2
    counts.begin_microbatch((large, large))
    counts.end_step()
    assert len(counts.latest.arguments) == 1
