"""Sums over ranks of several hosts. The hosts are in name only, each a part of the ranks of this
one."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import tier
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from comm.test_segment import forked
from comm.test_shared import values
from lockstep.comm import segment
from lockstep.comm.hierarchical import HierarchicalAllReduce
from lockstep.comm.segment import ExchangeError, Unavailable
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.testing.pool import WorkerPool

SIZES = (0, 1, 7, 5000, 300_000)


def on_hosts(names: str) -> HierarchicalAllReduce | Unavailable:
    """Each rank is on the host that its letter names."""
    segment.process_id_space = lambda: [names[distributed.get_rank()], 1]  # type: ignore[attr-defined]
    made = SharedMemoryGroup.create()
    assert isinstance(made, Unavailable)
    assert made.hosts == tuple(names.index(name) for name in names)
    hosts = HierarchicalAllReduce.create(distributed.group.WORLD, made.hosts)
    if isinstance(hosts, HierarchicalAllReduce):
        HierarchicalAllReduce.connect([hosts.leaders], [hosts])
    return hosts


def parts(length: int) -> list[Tensor]:
    return [
        values(length, torch.float32, (length, rank))
        for rank in range(distributed.get_world_size())
    ]


def sums(names: str) -> tuple[bool, list[Tensor], list[Tensor]]:
    """Whether vectors' sums are right, and a model's gradients beside those of all ranks' rows on
    one process, in float64."""
    hosts, rank, size = on_hosts(names), distributed.get_rank(), distributed.get_world_size()
    assert isinstance(hosts, HierarchicalAllReduce)
    right = True
    for length in SIZES:
        mine = parts(length)[rank].clone()
        hosts.all_reduce(mine)
        right &= torch.allclose(mine, torch.stack(parts(length)).sum(dim=0), rtol=1e-4, atol=1e-2)
        everyone = [torch.empty_like(mine) for _ in range(size)]
        distributed.all_gather(everyone, mine)
        right &= all(torch.equal(each, mine) for each in everyone)
    models = [
        nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5)).double() for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    parallel = DistributedDataParallel(models[0], gradient_as_bucket_view=True, bucket_cap_mb=0.002)
    parallel.register_comm_hook(None, hosts.sum_bucket)
    rows = values(30 * size, torch.float64, (0,)).view(size, 30)
    for _ in range(3):
        models[0].zero_grad()
        parallel(rows[rank]).square().sum().backward()
    models[1](rows).square().sum().backward()
    hosts.close()
    return right, *[
        [p.grad.clone() for p in model.parameters() if p.grad is not None] for model in models
    ]  # type: ignore[return-value]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, marks=tier(len(names)))
        for names in ("aab", "aba", "baa", "aabb", "abab", "aaab")
    ],
)
def test_the_sum_is_over_the_ranks_of_all_hosts(pool: WorkerPool, names: str) -> None:
    for right, found, expected in pool.run(len(names), sums, names):
        assert right
        assert len(found) == len(expected) == 4
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def refused(names: str, breaks: int) -> HierarchicalAllReduce | Unavailable:
    """Rank `breaks` cannot open the memory of its host. (The pool looks for what is left
    behind.)"""
    if distributed.get_rank() == breaks:
        made = segment._open
        segment._open = lambda *_: made([{"process": os.getpid(), "descriptor": -1}], 0)
    return on_hosts(names)


def test_ranks_that_are_all_on_hosts_of_their_own_have_nothing_to_share(pool: WorkerPool) -> None:
    assert (
        pool.run(3, refused, "abc", -1) == [Unavailable("no two of its ranks are on one host")] * 3
    )


def test_where_one_host_has_no_memory_no_rank_uses_any(pool: WorkerPool) -> None:
    reasons = {found.reason for found in pool.run(3, refused, "abb", 1)}
    assert len(reasons) == 1
    assert "rank 1: FileNotFoundError" in reasons.pop()


def lose_a_host(folder: str, rank: int) -> str:
    """Rank 2, the whole of host b, is killed: the first of host a hears of it from the network, and
    lives on; the second from the first."""
    hosts = on_hosts("aab")
    assert isinstance(hosts, HierarchicalAllReduce)
    tensor = torch.ones(1000)
    hosts.all_reduce(tensor)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)

    def until_it_fails() -> None:
        for _ in range(1000):
            hosts.all_reduce(tensor)

    with pytest.raises((RuntimeError, ExchangeError)) as raised:
        until_it_fails()
    # Rank 0 keeps its connections open until rank 1 has failed by itself, or its test has.
    reader = Path(folder, "rank-1-has-failed")
    if rank == 1:
        reader.touch()
    until = time.monotonic() + 60
    while not reader.exists() and time.monotonic() < until:
        time.sleep(0.01)
    hosts.close()
    return type(raised.value).__name__


def losing(path: str) -> list[Any]:
    return forked(path, 3, partial(lose_a_host, path))


def test_the_loss_of_another_host_ends_the_waits_of_all_ranks(
    pool: WorkerPool, tmp_path: Path
) -> None:
    [found] = pool.run(1, losing, str(tmp_path))
    assert found[2] == -signal.SIGKILL
    assert found[0] in ("RuntimeError", "DistBackendError"), found
    assert found[1] == "PeerStopped"
