"""After the loss of a whole host, at any moment, the others have all of the state."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
from checkpoint.given_images import STEPS, give_away, listening, on_hosts, read, received, written
from checkpoint.states import ATTEMPT, loaded, numbered
from hypothesis import given, strategies as st

from lockstep.checkpoint import images as slots
from lockstep.checkpoint.image_writer import ImageWriter, buddy_of_each
from lockstep.testing.pool import WorkerFailed, WorkerPool


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_every_rank_has_a_buddy_on_the_next_host_which_has_no_more_than_the_others(
    local_sizes: list[int],
) -> None:
    host_of = [host for host, size in enumerate(local_sizes) for _ in range(size)]
    buddies = buddy_of_each(local_sizes)
    assert len(buddies) == len(host_of)
    for rank, buddy in enumerate(buddies):
        assert host_of[buddy] == (host_of[rank] + 1) % len(local_sizes) != host_of[rank]
    for host, size in enumerate(local_sizes):
        loads = [buddies.count(rank) for rank in range(len(host_of)) if host_of[rank] == host]
        assert max(loads) - min(loads) <= 1
        assert sum(loads) == local_sizes[host - 1]
        assert len(loads) == size


def left_after(
    paths: Sequence[Sequence[str]], hosts: Sequence[int], lost: Sequence[int]
) -> list[list[str]]:
    """The memory on each host that is not lost."""
    starts = [0, *accumulate(hosts)]
    return [
        [path for each in paths[starts[host] : starts[host + 1]] for path in each]
        for host in range(len(hosts))
        if host not in lost
    ]


@pytest.mark.parametrize(
    ("hosts", "new"),
    [
        ([1, 1], [1]),
        ([1, 1], [1, 1]),
        ([2, 2], [1]),
        ([2, 2], [2]),
        ([1, 1, 1], [1, 1]),
        ([2, 1], [1, 1, 1]),
    ],
)
def test_after_the_loss_of_any_host_the_others_have_all_of_the_state(
    pool: WorkerPool, hosts: list[int], new: list[int]
) -> None:
    """`new`: the ranks of each host afterwards; one more than are left is a new host, which has
    nothing."""
    processes = sum(hosts)
    with written(pool, processes, hosts=hosts) as paths:
        for lost in range(len(hosts)):
            left = [*left_after(paths, hosts, [lost]), [], []]
            seen = [left[host] for host, size in enumerate(new) for _ in range(size)]
            found = pool.run(sum(new), read, seen, processes)
            assert [(step, wrong) for step, wrong, _ in found] == [(STEPS, [])] * sum(new)


def test_after_the_loss_of_two_hosts_next_to_each_other_there_is_no_image(pool: WorkerPool) -> None:
    hosts = [1, 1, 1, 1]
    with written(pool, 4, [1, 2], hosts=hosts) as paths:
        for host in range(4):
            left = left_after(paths, hosts, [host, (host + 1) % 4])
            assert pool.run(2, read, left, 4) == [(None, [], 0)] * 2
        left = left_after(paths, hosts, [0, 2])
        assert [(step, wrong) for step, wrong, _ in pool.run(2, read, left, 4)] == [(2, [])] * 2


def test_on_one_host_nobody_keeps_the_images_of_others(pool: WorkerPool) -> None:
    with written(pool, 2, [1]) as paths:
        assert [len(each) for each in paths] == [1, 1]


def write_until(address: str, dies_at: int, dies_after: float) -> None:
    """Write images on two hosts until the last rank is killed: at the moment number `dies_at` of
    its third write, or `dies_after` seconds after its second write."""
    world = on_hosts([1, 1])
    writer = ImageWriter(world, ATTEMPT, {})
    state = numbered(0, tensors=8, numbers=40_000)
    writer.prepare(state)
    give_away(writer, address, world.rank)
    for step in range(1, 10**6):
        for tensor in state.values():
            tensor.fill_(step)
        if world.rank == 1 and step == 3:
            if dies_at:
                die_at(dies_at)
            else:
                threading.Timer(dies_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        writer.write(step, state, {"step": step})


def die_at(moment: int) -> None:
    """Kill this process at this moment of all that its writes to memory by `os.pwrite` pass."""
    left, write = [moment], os.pwrite

    def pass_one() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def torn(descriptor: int, data: bytes, at: int) -> int:
        pass_one()
        write(descriptor, data[: len(data) // 2], at)
        pass_one()
        return write(descriptor, data, at)

    slots.os.pwrite = torn  # type: ignore[attr-defined]


def images_after(pool: WorkerPool, *how: Any) -> list[dict[int, set[float]]]:
    """The images in the memory of rank 0, of rank 1, and of both, after the latter has died."""
    with listening() as listener:
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            pool.run(2, write_until, listener.getsockname().decode(), *how)
        with received(listener, 2) as (one, other):
            return [loaded(paths) for paths in (one, other, [*one, *other])]


def test_the_death_of_a_buddy_at_any_moment_leaves_a_whole_image_on_either_host(
    pool: WorkerPool,
) -> None:
    """Seven writes, each torn in two: header, file's head, text and header of its own image, then
    of the other's."""
    torn = 0
    for moment in range(1, 15):
        for images in images_after(pool, moment, 0.0):
            assert all(numbers == {float(step)} for step, numbers in images.items())
            assert 2 in images
            torn += len(images) == 1
    assert torn > 14


def test_the_death_of_a_buddy_at_any_instant_leaves_a_whole_image_on_either_host(
    pool: WorkerPool,
) -> None:
    chance = random.Random(7)
    for _ in range(8):
        for images in images_after(pool, 0, 0.3 * chance.random()):
            assert images
            assert all(numbers == {float(step)} for step, numbers in images.items())
