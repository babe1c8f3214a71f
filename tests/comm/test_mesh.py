"""The memory of each axis of a mesh: had where the ranks of the axis are on one host, wherever the
others are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
from tiers import tier

from lockstep.comm import segment
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import join
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool

ELSEWHERE = "runs on another host than rank 0"
INSIDE = "the ranks of each host share memory, and one leader per host sums over the hosts"


def laid_out(plan: str, ranks_a_host: int) -> tuple[dict[str, float], Mapping[str, str]]:
    """Which axes have memory, if only inside of hosts, with a sum over each; and why others have
    none.

    Hosts are in name only: all of these ranks could share.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    segment.process_id_space = lambda: [f"host {rank // ranks_a_host}", 1]  # type: ignore[attr-defined]
    world = join(
        rank=rank, size=size, local_rank=rank, local_size=size, timeout=timedelta(minutes=1)
    )
    mesh = Mesh.of(world, Plan.parse(plan).resolve(size))
    sums = {}
    groups: dict[str, Any] = {
        "data": mesh.data,
        **{each.name: mesh.axis(each.name) for each in mesh.larger},
    }
    for name, each in groups.items():
        if each.shared_memory is not None or each.hierarchy is not None:
            tensor = torch.tensor([float(rank)])
            each.all_reduce(tensor)
            sums[name] = tensor.item()
    mesh.close()
    return sums, mesh.without_shared_memory


CASES: list[tuple[str, int, list[dict[str, float]], Mapping[str, str]]] = [
    ("replicate=2", 2, [{"data": 1, "replicate": 1}] * 2, {}),
    ("shard=2", 2, [{"data": 1, "shard": 1}] * 2, {}),
    ("shard=2,transport=torch", 2, [{}] * 2, {"shard": "the plan says transport=torch"}),
    ("tensor=2", 2, [{}] * 2, {}),
    ("replicate=2,tensor=2", 4, [{"data": 2, "replicate": 2}, {"data": 4, "replicate": 4}] * 2, {}),
    (
        *("replicate=2,shard=2", 2, [{"data": 6, "shard": 1}] * 2 + [{"data": 6, "shard": 5}] * 2),
        {"data": f"rank 2 {ELSEWHERE}; {INSIDE}", "replicate": f"rank 1 {ELSEWHERE}"},
    ),
    (
        "replicate=3",
        2,
        [{"data": 3, "replicate": 3}] * 3,
        {"replicate": f"rank 2 {ELSEWHERE}; {INSIDE}"},
    ),
    ("replicate=3,numerics=bitwise", 2, [{}] * 3, {"replicate": f"rank 2 {ELSEWHERE}"}),
    ("replicate=2", 1, [{}] * 2, {"replicate": f"rank 1 {ELSEWHERE}"}),
    ("shard=2,tensor=2", 3, [{"data": 2, "shard": 2}, {}] * 2, {"shard": f"rank 1 {ELSEWHERE}"}),
    (
        *("replicate=2,shard=2", 4),
        [
            {"data": 6, "replicate": 2 + 2 * inner, "shard": 1 + 4 * outer}
            for outer in (0, 1)
            for inner in (0, 1)
        ],
        {},
    ),
]
"""Plan, ranks a host, the sums of the ranks' numbers over the axes that have any memory, on each
rank, and why others have none."""


@pytest.mark.parametrize(
    ("plan", "ranks_a_host", "sums", "apart"),
    [
        pytest.param(*case, marks=() if case[0] == "replicate=2,shard=2" else tier(len(case[2])))
        for case in CASES
    ],
)
def test_an_axis_has_memory_where_its_own_ranks_are_on_one_host(
    pool: WorkerPool,
    plan: str,
    ranks_a_host: int,
    sums: list[dict[str, float]],
    apart: Mapping[str, str],
) -> None:
    world_size = len(sums)
    assert pool.run(world_size, laid_out, plan, ranks_a_host) == [(each, apart) for each in sums]
