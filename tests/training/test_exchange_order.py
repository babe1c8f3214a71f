"""Digests of the order of exchanges, which are compared by a sum."""

from __future__ import annotations

import random

from lockstep.training.reducers.exchange_order import BITS, numbers_of


def sums(digests: list[list[int]]) -> list[float]:
    """`digests`: those of the ranks of each group."""
    rows = [
        numbers_of(digest, rank=rank, size=len(group), group=place, groups=len(digests))
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
