"""Collectives of random kinds, sizes, types and groups through shared memory, beside the same
through Gloo; and ranks killed amid them.

The numbers are whole and small, so that every sum is exact in every type and any order: the two
must agree to the last bit.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from comm.test_segment import Caught, caught, forked
from comm.test_shared import shared_group
from lockstep.comm import shared_memory as shared
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.testing.pool import WorkerPool

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
"""Those that both know."""
MEMBERS = {
    3: ([0, 1, 2], [0, 2], [1, 2], [0, 1]),
    4: ([0, 1, 2, 3], [0, 2], [1, 3], [0, 1, 2], [1, 2, 3], [0, 3]),
}
OPERATIONS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "start_all_gather",
    "broadcast",
    "all_to_all",
)


def numbers(length: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randint(0, 30, (length,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def length_of(draw: random.Random) -> int:
    return draw.choice(
        [
            0,
            1,
            2,
            draw.randrange(100),
            draw.randrange(3000),
            draw.randrange(30_000),
            draw.randrange(200_000),
        ]
    )


def both(
    group: SharedMemoryGroup, gloo: Any, draw: random.Random, seed: int
) -> tuple[str, Tensor, Tensor]:
    """What was called, and what came of it through shared memory and through Gloo."""
    operation, dtype, length, source = (
        draw.choice(OPERATIONS),
        draw.choice(DTYPES),
        length_of(draw),
        draw.randrange(group.size),
    )
    sizes = [[min(length_of(draw), 30_000) for _ in range(group.size)] for _ in range(group.size)]
    sent = numbers(length, dtype, 10 * seed + group.rank)
    found, expected = sent.clone(), sent.clone()
    if operation == "all_reduce":
        group.all_reduce(found)
        distributed.all_reduce(expected, group=gloo)
    elif operation == "broadcast":
        group.broadcast(found, source)
        distributed.broadcast(expected, group=gloo, group_src=source)
    elif operation == "reduce_scatter":
        sent = numbers(length * group.size, dtype, 10 * seed + group.rank)
        group.reduce_scatter(found, sent)
        distributed.reduce_scatter_single(expected, sent.clone(), group=gloo)
    elif operation == "all_to_all":
        mine, theirs = sizes[group.rank], [row[group.rank] for row in sizes]
        sent = numbers(sum(mine), dtype, 10 * seed + group.rank)
        found, expected = sent.new_empty(sum(theirs)), sent.new_empty(sum(theirs))
        group.all_to_all(found, sent, theirs, mine)
        distributed.all_to_all_single(expected, sent, theirs, mine, group=gloo)
    else:
        found, expected = sent.new_empty(group.size * length), sent.new_empty(group.size * length)
        if operation == "all_gather":
            group.all_gather(found, sent)
            distributed.all_gather_single(expected, sent, group=gloo)
        else:
            begun = group.start_all_gather(found, sent)
            distributed.all_gather_single(expected, sent, group=gloo)
            begun.wait()
    return f"{operation} of {dtype}, {length}, {sizes}", found, expected


def random_cases(seed: int, count: int) -> list[str]:
    """What differed. Ranks that are not in a case's group are in a later one meanwhile."""
    members = MEMBERS[distributed.get_world_size()]
    rank = distributed.get_rank()
    gloo = [distributed.new_group(each) for each in members]
    made = {
        (place, size): SharedMemoryGroup.create(gloo[place], buffer_bytes=size)
        for place, each in enumerate(members)
        if rank in each
        for size in (16 << 10, shared.BUFFER_BYTES)
    }
    wrong = []
    for case in range(count):
        draw = random.Random(seed + case)
        place, size = draw.randrange(len(members)), draw.choice([16 << 10, shared.BUFFER_BYTES])
        shared._DIRECT_RANKS, shared._DIRECT_BYTES = (
            draw.choice([0, 4]),
            draw.choice([0, 256 << 10]),
        )
        if rank in members[place]:
            group = made[place, size]
            assert isinstance(group, SharedMemoryGroup), group
            what, found, expected = both(group, gloo[place], draw, seed + case)
            if not torch.equal(found, expected):
                wrong.append(f"case {case} (seed {seed}), ranks {members[place]}: {what}")
    for each in made.values():
        assert isinstance(each, SharedMemoryGroup)
        each.close()
    return wrong


@pytest.mark.parametrize(
    ("world_size", "count"),
    [(3, 200), pytest.param(4, 10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_random_collectives_agree_with_gloo_in_any_group(
    pool: WorkerPool, world_size: int, count: int
) -> None:
    seed = random.randrange(10**6)
    assert (
        pool.run(world_size, random_cases, seed, count, timeout_seconds=800) == [[]] * world_size
    ), seed


def lose_at_random(lost: int, seconds: float, rank: int) -> Caught:
    group = shared_group()
    draw = random.Random(lost)
    part, whole = torch.ones(10_000), torch.ones(10_000 * group.size)
    calls = [
        lambda: group.all_reduce(whole),
        lambda: group.reduce_scatter(part, whole),
        lambda: group.all_gather(whole, part),
        lambda: group.start_all_gather(whole, part),
        lambda: group.broadcast(whole, 0),
    ]

    def many() -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            draw.choice(calls)()

    if rank == lost:
        threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    found = caught(group, many)
    group.close()
    return found


def losing(path: str, lost: int, seconds: float) -> list[Any]:
    return forked(path, 3, partial(lose_at_random, lost, seconds))


@pytest.mark.parametrize(
    "runs", [3, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_a_rank_killed_at_a_random_moment_is_named_on_all_others(
    pool: WorkerPool, tmp_path: Path, runs: int
) -> None:
    for run in range(runs):
        lost, seconds = random.randrange(3), random.random() / 2
        folder = tmp_path / str(run)
        folder.mkdir()
        [found] = pool.run(1, losing, str(folder), lost, seconds)
        assert found.pop(lost) == -signal.SIGKILL
        for kind, ranks, text, _ in found:
            assert (kind, ranks) == ("PeerDied", (lost,)), text
