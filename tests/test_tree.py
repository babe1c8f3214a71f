from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lockstep.tree import Counter, LeavesInAnyOrder, cover, fold


def whole(a, b, combine, leaves):
    """The definition of the tree, written down once more."""
    if b - a == 1:
        return leaves[a]
    middle = a + max(2**k for k in range(20) if 2**k < b - a)
    return combine(whole(a, middle, combine, leaves), whole(middle, b, combine, leaves))


def tree_nodes(a, b):
    if b - a == 1:
        return {(a, b)}
    middle = a + max(2**k for k in range(20) if 2**k < b - a)
    return {(a, b)} | tree_nodes(a, middle) | tree_nodes(middle, b)


@st.composite
def splits(draw):
    """A count of leaves and the bounds of a contiguous share for each of some ranks; shares may be
    empty."""
    count = draw(st.integers(1, 200))
    inner = draw(st.lists(st.integers(0, count), max_size=9))
    return count, list(pairwise([0, *sorted(inner), count]))


def fold_over_ranks(count, shares, combine, leaves):
    nodes, values = [], []
    for start, stop in shares:
        counter = Counter(combine, start=start, count=count)
        for leaf in range(start, stop):
            counter.push(leaves[leaf])
        assert counter.nodes == cover(start, stop, count)
        nodes += counter.nodes
        values += counter.values
    return fold(nodes, values, count, combine)


@given(splits())
def test_any_split_over_ranks_gives_the_expression_of_one_process(split):
    count, shares = split
    leaves = [f"{leaf} " for leaf in range(count)]
    bracket = "({}{})".format
    assert fold_over_ranks(count, shares, bracket, leaves) == whole(0, count, bracket, leaves)


@given(splits(), st.integers(0, 2**32))
def test_any_split_over_ranks_gives_the_bits_of_one_process_when_added_in_place(split, seed):
    count, shares = split
    leaves = np.random.default_rng(seed).standard_normal((count, 3)).astype(
        np.float32
    ) * np.float32(1e3)
    expected = whole(0, count, np.add, leaves)
    assert (
        fold_over_ranks(
            count, shares, lambda a, b: np.add(a, b, out=a), list(leaves.copy())
        ).tobytes()
        == expected.tobytes()
    )


@given(splits())
def test_a_cover_is_made_of_nodes_of_the_tree_and_no_two_of_them_could_be_one(split):
    count, shares = split
    nodes = tree_nodes(0, count)
    for start, stop in shares:
        covered = cover(start, stop, count)
        assert set(covered) <= nodes
        assert [leaf for a, b in covered for leaf in range(a, b)] == list(range(start, stop))
        assert not any(
            (a, d) in nodes for i, (a, _) in enumerate(covered) for _, d in covered[i + 1 :]
        )


def test_equal_shares_of_a_power_of_two_are_one_node_each():
    assert [cover(start, start + 4, 16) for start in (0, 4, 8, 12)] == [
        [(0, 4)],
        [(4, 8)],
        [(8, 12)],
        [(12, 16)],
    ]


def test_the_tree_over_seven_leaves():
    leaves = list("abcdefg")
    assert fold([(i, i + 1) for i in range(7)], leaves, 7, "({}{})".format) == "(((ab)(cd))((ef)g))"


@given(st.integers(0, 2000), st.integers(1, 2000))
def test_a_counter_holds_few_values_at_a_time(start, leaves):
    count = start + leaves
    counter = Counter(int.__add__, start=start, count=count)
    for _ in range(leaves):
        counter.push(1)
        assert len(counter.values) <= 2 * count.bit_length()


@pytest.mark.parametrize(
    "nodes", [[(0, 2)], [(0, 2), (3, 4)], [(2, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 5)], []]
)
def test_nodes_that_do_not_make_up_the_tree_are_refused(nodes):
    with pytest.raises(ValueError, match="node"):
        fold(nodes, [1] * len(nodes), 4, int.__add__)


def test_a_leaf_beyond_the_last_is_refused():
    counter = Counter(int.__add__, start=3, count=4)
    counter.push(1)
    with pytest.raises(ValueError, match=r"node \(4, 5\) after leaf 3 of 4"):
        counter.push(1)


@given(splits(), st.randoms(use_true_random=False))
def test_leaves_that_arrive_in_any_order_give_the_expressions_of_the_cover(split, random):
    count, shares = split
    leaves = [f"{leaf} " for leaf in range(count)]
    bracket = "({}{})".format
    for start, stop in shares:
        order = list(range(start, stop))
        random.shuffle(order)
        late = order[: len(order) // 2]
        sums = LeavesInAnyOrder(bracket, count=count)
        for leaf in order[len(late) :]:
            sums.add(leaf, leaves[leaf])
        assert sums.missing(range(start, stop)) == sorted(late)
        for leaf in late:
            sums.add(leaf, leaves[leaf])
        counter = Counter(bracket, start=start, count=count)
        for leaf in range(start, stop):
            counter.push(leaves[leaf])
        assert sums.values == dict(zip(counter.nodes, counter.values, strict=True))
