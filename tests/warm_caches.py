"""Fills torch's caches in the pool's nursery, whose forks the workers are.

A first training in a process imports modules, traces how a model is initialized, and asks for the
result of each operation on fake tensors. Here a model of the shape that most tests train does so
once, on a world of two ranks that torch fakes. This takes a second, and saves each worker 0.05 to
0.1 s of CPU time under `shard` and `tensor`. The group is fake, so no thread starts, and a fork is
safe.
"""

from __future__ import annotations

import platform

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lockstep.model.initialization.deferred_init import DeferredModel


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train two steps; the first one allocates the optimizer's state."""
    for _ in range(2):
        model(torch.zeros(4, 6)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def fill_caches() -> None:
    torch.set_num_threads(1)
    platform.platform()  # it asks a program, `uname -p`; each training records what it answers
    # A process's first backward starts a thread for each accelerator, after which a fork cannot
    # compute one. In a build for CUDA, FakeTensorMode pretends that there are 8 accelerators (torch
    # 2.14 and 2.15).
    torch.ones((), requires_grad=True).backward()
    DeferredModel.build(network, 1).materialize("0.weight")
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    # A mesh of a name that no test uses: DTensor's cache would give its rank to an equal mesh.
    mesh = DeviceMesh.from_group([group], "cpu", torch.arange(2), mesh_dim_names=("warm",))
    for axis in ("shard", "tensor"):
        for build in (
            lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        ):
            model = network()
            if axis == "shard":
                fully_shard(model, mesh=mesh)
            else:
                parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            train(model, build(model))
    dist.destroy_process_group()


fill_caches()
