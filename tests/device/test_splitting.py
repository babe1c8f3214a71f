"""Process groups of mesh axes where the default group is bound to a device, so that its backend can
split it."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.base.torch_private import PrefixStore, TCPStore
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import join
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool


def axes_of_a_bound_group(plan: str) -> dict[str, list[float]]:
    """Return the timeout of each axis in seconds, and the sum of its ranks, on the CPU and on the
    device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    device = torch.device("standin", rank)
    torch.accelerator.set_device_index(rank)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    config, met = "cpu:gloo,standin:standin_gloo", PrefixStore("bound", store)
    dist.init_process_group(
        config,
        store=met,
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=10),
        device_id=device,
    )
    world = join(rank=rank, size=size, local_rank=rank, local_size=size)
    mesh = Mesh.of(world, Plan.parse(plan).resolve(size))
    found = {}
    for name, axis in {
        **{each.name: mesh.axis(each.name) for each in mesh.larger},
        "data": mesh.data,
    }.items():
        seen = []
        for kind in (torch.device("cpu"), device):
            group = axis.group or dist.group.WORLD
            number = torch.tensor([float(rank)], device=kind)
            dist.all_reduce(number, group=group)
            seen += [group._get_backend(kind).options._timeout.total_seconds(), number.item()]
        found[name] = seen
    mesh.close()
    return found


@pytest.mark.parametrize("plan", ["replicate=2,shard=2"])
def test_the_groups_of_axes_have_the_timeout_of_all_groups_on_the_cpu_too(
    devices: WorkerPool, plan: str
) -> None:
    for rank, found in enumerate(devices.run(4, axes_of_a_bound_group, plan)):
        replicas, shards = float(2 * (rank % 2) + 2), float(4 * (rank // 2) + 1)
        assert found == {
            "replicate": [600.0, replicas, 600.0, replicas],
            "shard": [600.0, shards, 600.0, shards],
            "data": [600.0, 6.0, 600.0, 6.0],
        }
