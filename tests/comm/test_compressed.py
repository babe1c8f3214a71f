"""Sums of which each rank sends its part in fewer bytes: near the exact ones, the same bits on
every rank, and nothing lost unnoticed."""

from __future__ import annotations

import pytest
import torch
from tiers import tier
from torch import Tensor, distributed
from worlds import all_ranks

from comm.test_hierarchical import on_hosts
from lockstep.comm.compressed_sum import CompressedAllReduce, Rounding, Senders
from lockstep.comm.hierarchical import HierarchicalAllReduce
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.comm.world import World
from lockstep.testing.pool import WorkerPool

LENGTHS = ((0, 0), (1, 3), (255, 0), (256, 1), (257, 10), (5000, 200))
"""Of the numbers and of those that are sent exactly."""
RELATIVE = {"bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 1 / 253.9}
"""How far one rounding leads away from a number: of its block's largest, at most."""


def given(length: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return torch.randn(length, generator=generator) * 10.0 ** (torch.arange(length) // 256 % 5 - 2)


def summed(name: str, through: str, keeps: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each of `LENGTHS` the sum, that of what is exact, and what this rank has left. All of
    them are under way at once."""
    world = all_ranks()
    rank, size = world.rank, world.size
    memory = SharedMemoryGroup.create() if through == "memory" else None
    assert memory is None or isinstance(memory, SharedMemoryGroup)
    senders = Senders(world.group, rank, size, memory, None)
    sums = []
    for length, exact in LENGTHS:
        sums.append(CompressedAllReduce(Rounding(name), senders, keeps_residual=keeps))
        sums[-1].start(given(length, rank), given(exact, 10 + rank))
    for each in sums:
        each.fold()
    found = []
    for each, (length, exact) in zip(sums, LENGTHS, strict=True):
        into = torch.empty(length), torch.empty(exact)
        each.finish(*into)
        found.append((*into, each.residual.reshape(-1)[:length] if keeps else torch.empty(0)))
    if memory is not None:
        memory.close()
    return found


@pytest.mark.parametrize("size", [pytest.param(size, marks=tier(size)) for size in (2, 3, 4)])
@pytest.mark.parametrize("name", RELATIVE)
def test_a_sum_is_near_the_exact_one_and_the_same_on_all_ranks_whatever_carries_it(
    pool: WorkerPool, name: str, size: int
) -> None:
    everyone = [
        each
        for through in ("gloo", "memory")
        for each in pool.run(size, summed, name, through, False)
    ]
    for place, (length, exact) in enumerate(LENGTHS):
        parts = torch.stack([given(length, rank) for rank in range(size)])
        first = everyone[0][place]
        for each in everyone:
            assert torch.equal(each[place][0], first[0])
            assert torch.equal(each[place][1], first[1])
        total = parts.double().sum(dim=0)
        if length:
            blocks = [block.abs().max() for block in parts.double().split(256, dim=1)]
            room = torch.cat(
                [(size + size) * RELATIVE[name] * most.expand(min(256, length)) for most in blocks]
            )[:length]
            assert bool(((first[0].double() - total).abs() <= 1.01 * room).all())
        expected = given(exact, 10)
        for rank in range(1, size):
            expected = expected + given(exact, 10 + rank)
        assert torch.equal(first[1], expected)


@pytest.mark.parametrize("size", [2, 3])
def test_what_rounding_took_is_left_with_the_ranks(pool: WorkerPool, size: int) -> None:
    everyone = pool.run(size, summed, "int8", "gloo", True)
    for place, (length, _) in enumerate(LENGTHS):
        parts = torch.stack([given(length, rank) for rank in range(size)])
        left = torch.stack([each[place][2] for each in everyone])
        torch.testing.assert_close(
            everyone[0][place][0] + left.sum(dim=0),
            parts.sum(dim=0),
            rtol=1e-5,
            atol=1e-5 * float(10.0**2),
        )
        assert not length or bool(left.any())


def senders(names: str) -> tuple[int, int, bool, bool]:
    """The place of this rank, how many there are, whether it is one, and whether it sends for
    others."""
    hosts, rank, size = on_hosts(names), distributed.get_rank(), distributed.get_world_size()
    assert isinstance(hosts, HierarchicalAllReduce)
    with_hosts = World(
        rank, size, rank, size, torch.device("cpu"), owns_group=False, hierarchy=hosts
    )
    made = Senders.of(with_hosts)
    hosts.close()
    return made.rank, made.size, made.includes_this_rank, hosts.shared_memory is not None


def test_of_several_hosts_one_rank_of_each_sends(pool: WorkerPool) -> None:
    assert pool.run(3, senders, "aba") == [
        (0, 2, True, True),
        (1, 2, True, False),
        (0, 2, False, True),
    ]
