"""The choice of microbatches that several ranks compute, and who is at fault."""

import pytest
from hypothesis import given, strategies as st

from lockstep.assignment import MicrobatchAssignment
from lockstep.recomputed import Recomputed, ranks_at_fault, recomputed


@given(st.integers(2, 9), st.integers(1, 60), st.booleans(), st.lists(st.integers(0), min_size=10))
def test_ranks_recompute_a_microbatch_of_every_other_rank_that_has_one(
    ranks, count, round_robin, random
):
    shares = MicrobatchAssignment(ranks, round_robin).indices_by_rank(count)
    found = recomputed(shares, lambda number: random[number])
    assert [each.ranks[0] for each in found] == [rank for rank, share in enumerate(shares) if share]
    assert all(each.microbatch in shares[each.ranks[0]] for each in found)
    assert {len(each.ranks) for each in found} == {min(ranks, 3)}
    for each in found:
        assert len(set(each.ranks)) == len(each.ranks)
    for role in range(1, min(ranks, 3)):
        assert len({each.ranks[role] for each in found}) == len(found)


@given(st.integers(3, 9), st.data(), st.lists(st.integers(0), min_size=10))
def test_the_one_rank_that_computes_other_gradients_is_named(ranks, data, random):
    faulty = data.draw(st.integers(0, ranks - 1))
    shares = MicrobatchAssignment(ranks).indices_by_rank(3 * ranks)
    chosen = recomputed(shares, lambda number: random[number])
    votes = [(each, [str(rank == faulty) for rank in each.ranks]) for each in chosen]
    assert ranks_at_fault(votes) == ([faulty], [])


def test_of_two_ranks_that_disagree_either_may_be_wrong():
    one = Recomputed(3, (0, 1))
    assert ranks_at_fault([(one, ["a", "b"])]) == ([], [0, 1])
    assert ranks_at_fault([(one, ["a", "a"])]) == ([], [])
    three = Recomputed(3, (4, 1, 2))
    assert ranks_at_fault([(three, ["a", "b", "c"])]) == ([], [1, 2, 4])
    # a rank that other votes name explains it
    assert ranks_at_fault([(three, ["a", "b", "c"]), (Recomputed(0, (1, 2, 3)), "xyy")]) == (
        [1],
        [],
    )


def test_two_faulty_ranks_of_four_are_named():
    chosen = [Recomputed(0, (0, 1, 2)), Recomputed(1, (1, 2, 3)), Recomputed(2, (3, 0, 1))]
    wrong = {0: "x", 2: "y"}
    votes = [(each, [wrong.get(rank, "right") for rank in each.ranks]) for each in chosen]
    assert ranks_at_fault(votes) == ([0, 2], [])
