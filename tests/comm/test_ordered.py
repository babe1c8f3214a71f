"""The ordered sum: whoever holds which microbatches, values are added in the one order of the
tree."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from worlds import all_ranks

from lockstep.assignment import MicrobatchAssignment
from lockstep.comm.ordered_sum import OrderedSum, TreeNodes
from lockstep.testing.pool import WorkerPool
from lockstep.tree import Counter, Node, cover, fold

LENGTHS = (0, 1, 2, 3, 7, 64, 1001)
COUNTS = (1, 2, 3, 5, 7, 8, 13)
SPEEDS = (1.0, 0.3, 5.0, 0.6)
"""Of each rank, where shares are unequal."""


def nodes_of(count: int, world_size: int, speeds: tuple[float, ...] = ()) -> TreeNodes:
    return TreeNodes.of(MicrobatchAssignment(world_size, speeds=speeds).indices_by_rank(count))


@given(count=st.integers(1, 300), world_size=st.integers(1, 40))
def test_the_shares_of_all_ranks_are_the_whole_tree_in_order(count: int, world_size: int) -> None:
    shares = nodes_of(count, world_size)
    nodes = [node for held in shares.nodes for node in held]
    assert len(shares.nodes) == world_size
    assert [start for start, _ in nodes] + [count] == [0] + [stop for _, stop in nodes]
    assert fold(nodes, [stop - start for start, stop in nodes], count, int.__add__) == count
    sizes = [sum(stop - start for start, stop in held) for held in shares.nodes]
    assert max(sizes) - min(sizes) <= 1


@given(exponent=st.integers(0, 6), world_exponent=st.integers(0, 5))
def test_at_powers_of_two_each_rank_holds_one_node_as_in_a_ring(
    exponent: int, world_exponent: int
) -> None:
    shares = nodes_of(2 ** (exponent + world_exponent), 2**world_exponent)
    assert all(len(held) == 1 for held in shares.nodes)


@given(count=st.integers(1, 300), world_size=st.integers(1, 40))
def test_a_share_is_covered_by_few_nodes(count: int, world_size: int) -> None:
    assert all(
        len(held) <= 2 * max(1, count.bit_length()) for held in nodes_of(count, world_size).nodes
    )


def leaves(count: int, length: int) -> list[Tensor]:
    """Values of very different sizes, so that another order gives other bits."""
    generator = torch.Generator().manual_seed(1000 * count + length)
    return [
        torch.randn(length, generator=generator) * 10.0 ** (place % 7) for place in range(count)
    ]


def ordered_sums(speeds: tuple[float, ...]) -> list[list[Tensor]]:
    """For each count of microbatches the sum of each length, all of a count under way at once."""
    warnings.simplefilter("error")  # every rank would show it
    world = all_ranks()
    rank, world_size = world.rank, world.size
    found = []
    for count in COUNTS:
        shares = nodes_of(count, world_size, speeds)
        sums = []
        for length in LENGTHS:
            ordered = OrderedSum(held(count, length, shares.nodes[rank]), shares, world)
            ordered.start(length, torch.empty(0))
            sums.append(ordered)
        for ordered in sums:
            ordered.fold()
        found.append([ordered.finish().clone() for ordered in sums])
    return found


def held(count: int, length: int, nodes: tuple[Node, ...]) -> list[Tensor]:
    if not nodes:
        return []
    counter = Counter(torch.Tensor.add_, start=nodes[0][0], count=count)
    for leaf in leaves(count, length)[nodes[0][0] : nodes[-1][1]]:
        counter.push(leaf)
    assert tuple(counter.nodes) == nodes == tuple(cover(nodes[0][0], nodes[-1][1], count))
    return counter.values


@pytest.mark.parametrize("speeds", [(), SPEEDS], ids=["equal", "unequal"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_sum_has_the_bits_of_the_tree_on_one_process_on_every_rank(
    pool: WorkerPool, world_size: int, speeds: tuple[float, ...]
) -> None:
    everyone = pool.run(world_size, ordered_sums, speeds[:world_size])
    for found in everyone:
        for count, sums in zip(COUNTS, found, strict=True):
            for length, total in zip(LENGTHS, sums, strict=True):
                spans = [(place, place + 1) for place in range(count)]
                expected = fold(spans, leaves(count, length), count, torch.add)
                assert total.shape == (length,)
                assert torch.equal(total, expected), f"{count} microbatches of {length}"


def test_another_order_of_these_values_has_other_bits() -> None:
    values = leaves(7, 64)
    spans = [(place, place + 1) for place in range(7)]
    assert not torch.equal(
        fold(spans, [value.clone() for value in values], 7, torch.add),
        sum(values, start=torch.zeros(64)),
    )
