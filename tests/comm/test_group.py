"""The small exchanges that everything else is made of."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, distributed

from lockstep.base.errors import LaunchError
from lockstep.comm.shared_memory import BUFFER_BYTES, SharedMemoryGroup
from lockstep.comm.world import World, exact_sum, join
from lockstep.testing.pool import WorkerPool

LONG = BUFFER_BYTES // 8
"""Numbers of a row, such that several rows are more than a buffer of the shared memory."""
COUNTS = {1: [3], 2: [2, 0], 3: [0, 3, 1], 4: [1, 0, 5, 2]}


def world() -> World:
    numbers = {name: int(os.environ[name.upper()]) for name in ("rank", "local_rank")}
    return join(
        size=int(os.environ["WORLD_SIZE"]),
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        **numbers,
    )


def rows_of(rank: int, count: int) -> Tensor:
    return torch.arange(count * 2, dtype=torch.float64).reshape(count, 2) + 100 * rank


def exchange(*, shares: bool) -> list[dict[str, Any]]:
    """What is exchanged: with `shares`, through shared memory, and after it was closed."""
    if not shares:
        return [exchanged(world())]
    memory = SharedMemoryGroup.create()
    assert isinstance(memory, SharedMemoryGroup)
    here = replace(world(), shared_memory=memory)
    with memory:
        found = exchanged(here)
    return [found, exchanged(here)]


def exchanged(here: World) -> dict[str, Any]:
    counts = COUNTS[here.size]
    rows = rows_of(here.rank, counts[here.rank])
    text = {
        "rank": here.rank,
        "text": "ü" * here.rank,
        "none": None,
        "list": [1.5, math.inf] * here.rank,
    }
    total = rows.sum(dim=0)
    here.all_reduce(total)
    return {
        "sum": total,
        "any": (here.any(here.rank == here.size - 1), here.any(False)),
        "world": (here.rank, here.size, str(here.device), here.owns_group),
        "rows": here.gather_rows(rows, counts),
        "no rows": here.gather_rows(rows[:0], [0] * here.size),
        "whole numbers": here.gather_rows(torch.tensor([here.rank]), [1] * here.size),
        "values": here.gather_values(text),
        "of one length": [
            here.gather_values(value)
            for value in (
                here.rank,
                None,
                "ü" * 100,
                f"{here.rank:100}",
                f"{here.rank:54}",
                f"{here.rank:55}",
            )
        ],
        "of one rank": [
            here.value_of(source, value)
            for source in range(here.size)
            for value in (text, here.rank, f"{here.rank:100}", None)
        ],
        "ragged": here.gather_ragged(rows if counts[here.rank] else None),
        "ragged, known shapes": here.gather_ragged(rows),
        "sent": [sent(here, dtype) for dtype in (torch.float64, torch.bfloat16, torch.int64)],
        "sent alike": here.all_to_all(torch.arange(2 * here.size).view(-1, 2) + 100 * here.rank),
        "ragged flags": here.gather_ragged(torch.ones(counts[here.rank], dtype=torch.bool)),
        "still there": distributed.is_initialized(),
    }


def rows_between(source: int, target: int) -> int:
    return (2 * source + target) % 3


def sent(here: World, dtype: torch.dtype) -> Tensor:
    """The first and last number of each received row: its source, and its target."""
    ranks, me = range(here.size), here.rank
    to_send = [rows_between(me, target) for target in ranks]
    rows = torch.full((sum(to_send), LONG), me, dtype=dtype)
    rows[:, -1] = torch.repeat_interleave(torch.arange(here.size), torch.tensor(to_send))
    received = [rows_between(source, me) for source in ranks]
    return here.all_to_all(rows, received, to_send)[:, [0, -1]]


@pytest.mark.parametrize(("world_size", "shares"), [*[(size, False) for size in COUNTS], (3, True)])
def test_every_rank_gets_the_rows_and_values_of_all_in_rank_order(
    pool: WorkerPool, world_size: int, shares: bool
) -> None:
    counts = COUNTS[world_size]
    everything = torch.cat([rows_of(rank, count) for rank, count in enumerate(counts)])
    everyone = pool.run(world_size, partial(exchange, shares=shares))
    for rank, found in [(rank, each) for rank, theirs in enumerate(everyone) for each in theirs]:
        assert torch.equal(found["sum"], everything.sum(dim=0))
        assert found["any"] == (True, False)
        assert found["world"] == (rank, world_size, "cpu", False)
        for name in ("rows", "ragged", "ragged, known shapes"):
            assert torch.equal(found[name], everything), name
            assert found[name].dtype is torch.float64
        assert found["no rows"].shape == (0, 2)
        assert found["whole numbers"].tolist() == list(range(world_size))
        for each, dtype in zip(
            found["sent"], (torch.float64, torch.bfloat16, torch.int64), strict=True
        ):
            assert each.tolist() == [
                [source, rank]
                for source in range(world_size)
                for _ in range(rows_between(source, rank))
            ]
            assert each.dtype is dtype
        assert found["sent alike"].tolist() == [
            [100 * source + 2 * rank, 100 * source + 2 * rank + 1] for source in range(world_size)
        ]
        assert found["ragged flags"].tolist() == [True] * sum(counts)
        assert [value["rank"] for value in found["values"]] == list(range(world_size))
        assert found["values"][-1]["text"] == "ü" * (world_size - 1)
        assert found["values"][-1]["list"] == [1.5, math.inf] * (world_size - 1)
        ranks = range(world_size)
        spaced = [[f"{each:{width}}" for each in ranks] for width in (100, 54, 55)]
        assert found["of one length"] == [
            [*ranks],
            [None] * world_size,
            ["ü" * 100] * world_size,
            *spaced,
        ]
        assert found["of one rank"] == [
            value
            for source in ranks
            for value in (found["values"][source], source, f"{source:100}", None)
        ]
        assert found["still there"]


def count_exchanges() -> list[int]:
    here, counts = world(), []
    for value in (here.rank, "same" * 100, f"{here.rank:100}"):
        with mock.patch.object(
            World, "gather_rows", autospec=True, side_effect=World.gather_rows
        ) as exchange:
            here.gather_values(value)
        counts.append(exchange.call_count)
    return counts


def test_values_that_are_short_or_the_same_take_one_exchange(pool: WorkerPool) -> None:
    assert pool.run(2, count_exchanges) == [[1, 1, 2]] * 2


def leave_a_group_of_others() -> bool:
    world().leave()
    return distributed.is_initialized()


def test_a_group_that_was_there_already_is_left_alone(pool: WorkerPool) -> None:
    assert pool.run(2, leave_a_group_of_others) == [True, True]


def join_and_leave_twice() -> list[tuple[bool, float]]:
    distributed.destroy_process_group()
    found = []
    for _ in range(2):
        here = world()
        found.append((here.owns_group, sum(here.gather_values(here.rank))))
        here.leave()
    return found


def test_a_group_that_was_made_serves_the_next_run_too(pool: WorkerPool) -> None:
    assert pool.run(2, join_and_leave_twice) == [[(True, 1), (True, 1)]] * 2


def test_one_process_needs_no_group() -> None:
    here = join(rank=0, size=1, local_rank=0, local_size=1)
    assert not here.owns_group
    assert here.gather_values({"a": 1}) == [{"a": 1}]
    assert here.value_of(0, {"a": 1}) == {"a": 1}
    assert here.gather_rows(torch.ones(2), [2]).tolist() == [1.0, 1.0]
    assert here.gather_ragged(torch.ones(2)).tolist() == [1.0, 1.0]
    here.leave()


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(LaunchError) as caught:
            join(rank=0, size=2, local_rank=0, local_size=2, timeout=timedelta(seconds=5))
        port = taken.getsockname()[1]
    assert (
        str(caught.value)
        == f"the rendezvous port 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT) is in use by another"
        " program; give another, or let lockstep run choose"
    )


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=60),
    st.randoms(use_true_random=False),
)
def test_an_exact_sum_does_not_depend_on_the_order(
    values: list[float], shuffled: random.Random
) -> None:
    other = values[:]
    shuffled.shuffle(other)
    assert exact_sum(values) == exact_sum(other)


def test_an_exact_sum_is_correctly_rounded_and_shows_what_is_not_finite() -> None:
    assert exact_sum([0.1] * 10) == 1.0
    assert exact_sum([1e16, 1.0, -1e16]) == 1.0
    assert exact_sum([]) == 0.0
    assert exact_sum([1.0, math.inf]) == math.inf
    assert math.isnan(exact_sum([math.nan, 1.0]))
    assert math.isnan(exact_sum([math.inf, -math.inf]))
    assert exact_sum([1e308, 1e308]) == math.inf
