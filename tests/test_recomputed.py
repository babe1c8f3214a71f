"""The choice of microbatches that several ranks compute, and who is at fault."""

import pytest
from hypothesis import given, strategies as st

from lockstep.assignment import MicrobatchAssignment
from lockstep.recomputed import (
    RECEIVED,
    SENT,
    WITHIN,
    Computed,
    Recomputed,
    Reported,
    ranks_at_fault,
    recomputed,
    verdict,
)


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


STAGES = 3


def computed(data: int, stage: int, fault: tuple[int, int, str]) -> Computed:
    """What a stage of a pipeline computes if one stage of one data rank is at fault, in its
    forward, in the gradient of its input, or in those of its weights."""
    found = []
    part, kind = fault[1:] if fault[0] == data else (-1, "")
    first_wrong = {"forward": part, "input": 2 * STAGES - 1 - part}.get(kind, 2 * STAGES)
    for each in (stage, 2 * STAGES - 1 - stage):
        found.append(([each, RECEIVED, 0], int(each > first_wrong)))
        found.append(([each, SENT, 0], int(each >= first_wrong)))
    is_late = 2 * STAGES - 1 - stage >= first_wrong
    return Computed(found, [int(is_late or (kind == "weights" and stage == part)), 0])


def reported(ranks: int, fault: tuple[int, int, str]) -> list:
    """Of stage s of data rank d, which is rank ranks * s + d."""
    return [
        [
            Reported([ranks * stage + data], [computed(data, stage, fault)] * 3)
            for stage in range(STAGES)
        ]
        for data in range(ranks)
    ]


@pytest.mark.parametrize("kind", ["forward", "input", "weights"])
@pytest.mark.parametrize("stage", range(STAGES))
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_of_the_stages_of_a_pipeline_the_one_that_is_wrong_is_named(ranks, stage, kind):
    shares = MicrobatchAssignment(ranks).indices_by_rank(2 * ranks)
    chosen = list(recomputed(shares, lambda number: 7 * number))
    for data in range(ranks):
        found = verdict(chosen, reported(ranks, (data, stage, kind)))
        if ranks > 2:
            assert (found.ranks, found.is_certain) == ([ranks * stage + data], True)
            assert data in found.microbatch.ranks
            assert found.microbatch.ranks[found.role] == data
        else:
            assert (found.ranks, found.is_certain) == ([ranks * stage, ranks * stage + 1], False)


def test_ranks_that_differ_at_the_same_position_are_named_together():
    one = [Recomputed(5, (0, 1, 2))]
    right = Computed([([0, WITHIN, 0], 3), ([0, WITHIN, 1], 4)], [1])
    wrong = Computed([([0, WITHIN, 0], 3), ([0, WITHIN, 1], 9)], [2])
    first = Computed([([0, WITHIN, 0], 8), ([0, WITHIN, 1], 9)], [2])

    def replicas(*of_the_second: Computed) -> list:
        everyone = [[right, right], list(of_the_second), [right, right]]
        return [
            [Reported([2 * data + place], [each] * 3) for place, each in enumerate(several)]
            for data, several in enumerate(everyone)
        ]

    found = verdict(one, replicas(wrong, wrong))
    assert (found.ranks, found.is_certain, found.has_third) == ([2, 3], False, True)
    found = verdict(one, replicas(wrong, first))
    assert (found.ranks, found.is_certain) == ([3], True)
    # nothing after the exchange can tell, and the shorter one is no error
    short = Computed([([0, WITHIN, 0], 3)], [1])
    found = verdict(one, replicas(right, short))
    assert (found.ranks, found.is_certain) == ([3], True)


def test_ranks_that_exchange_inside_of_layers_are_one_place():
    right, wrong = Computed([], [1, 1]), Computed([], [1, 2])
    replicas = [
        [Reported([2 * data, 2 * data + 1], [each] * 3)]
        for data, each in enumerate([right, right, wrong])
    ]
    found = verdict([Recomputed(5, (0, 1, 2))], replicas)
    assert (found.ranks, found.is_certain, found.has_third) == ([4, 5], False, True)


def test_what_is_received_and_was_not_sent_is_no_computation():
    right = Computed([([0, RECEIVED, 0], 3), ([0, SENT, 0], 4)], [1])
    wrong = Computed([([0, RECEIVED, 0], 8), ([0, SENT, 0], 9)], [2])
    replicas = [[Reported([rank], [each] * 3)] for rank, each in enumerate([right, wrong, right])]
    found = verdict([Recomputed(5, (0, 1, 2))], replicas)
    assert (found.ranks, found.is_certain) == ([1], False)
    assert found.position == [0, RECEIVED, 0]
