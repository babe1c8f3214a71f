"""The order of exchanges: digests, which are compared by a sum, and the exchanges themselves, which
ranks that wait compare."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Any

from lockstep.comm.compared_bits import BITS
from lockstep.training.reducers.exchange_order import (
    Exchanges,
    digest_numbers,
    first_different_exchange,
)


def sums(digests: list[list[int]]) -> list[float]:
    """`digests`: those of the ranks of each group."""
    rows = [
        digest_numbers(digest, rank=rank, size=len(group), group=place, groups=len(digests))
        for place, group in enumerate(digests)
        for rank, digest in enumerate(group)
    ]
    return [sum(column) for column in zip(*rows, strict=True)]


def test_sums_are_zero_exactly_if_the_ranks_of_each_group_agree() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        groups, size = drawn.randint(1, 4), drawn.randint(2, 6)
        digests = [[drawn.getrandbits(BITS)] * size for _ in range(groups)]
        assert not any(sums(digests))
        wrong = drawn.randrange(groups)
        changed = drawn.sample(range(size), drawn.randint(1, size - 1))
        digests[wrong] = [
            digest ^ (1 << drawn.randrange(BITS)) if rank in changed else digest
            for rank, digest in enumerate(digests[wrong])
        ]
        if len(set(digests[wrong])) > 1:
            assert any(sums(digests))


def test_groups_that_differ_in_opposite_ways_do_not_cancel() -> None:
    assert any(sums([[1, 0], [0, 1]]))


def exchanges(rank: int, *blocks: str, **where: Any) -> Exchanges:
    calls = tuple((f"gathers block {each!r}", f"in microbatch {rank}") for each in blocks)
    made = Exchanges(rank, **{"order": 1, "group": 0, "step": 4, "first": 0, **where}, calls=calls)
    return Exchanges.from_json(json.loads(json.dumps(asdict(made))))


def test_the_first_exchange_that_differs_is_named_for_both_ranks() -> None:
    found = first_different_exchange(
        [exchanges(0, *"abc"), exchanges(1, *"abc"), exchanges(2, *"aacb")]
    )
    assert found == (
        "rank 0 gathers block 'b' in microbatch 0 and rank 2 gathers block 'a' in microbatch 2"
    )


def test_a_rank_that_is_behind_another_does_not_differ() -> None:
    drawn = random.Random(0)
    for _ in range(200):
        order = [drawn.choice("abc") for _ in range(20)]
        ranks = []
        for rank in range(3):
            first, stop = drawn.randint(0, 19), drawn.randint(0, 20)
            ranks.append(exchanges(rank, *order[first:stop], first=first))
        assert first_different_exchange(ranks) is None


def test_exchanges_of_other_steps_groups_and_models_are_not_compared() -> None:
    one = exchanges(0, "a")
    for other in ({"step": 5}, {"group": 2}, {"order": 2}):
        assert first_different_exchange([one, exchanges(1, "b", **other)]) is None
    assert first_different_exchange([one, exchanges(1, "b")]) is not None
