"""The processes of a run laid out on the axes of its plan."""

from __future__ import annotations

import atexit
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.assignment import MicrobatchAssignment
from lockstep.base import accelerator
from lockstep.base.torch_private import (
    forget_process_groups,
    set_item_of_distributed,
    to_local as to_local,
)
from lockstep.comm.backend import TIMEOUT
from lockstep.comm.hierarchical import HierarchicalAllReduce, forget_leader_groups
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.comm.world import World
from lockstep.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA_AXES = ("replicate", "shard")
"""The axes whose ranks compute different microbatches."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The position of this rank on the mesh axes, outermost first: pipeline, replicate, shard,
    tensor."""

    world: World
    data: World
    """The data ranks: those that compute the microbatches together, with this one's position on the
    other axes."""
    assignment: MicrobatchAssignment
    """The microbatches of each rank of `data`."""
    torch_mesh: DeviceMesh | None
    """Torch's mesh of the axes larger than 1, by name. None if the only one is `replicate`, or if
    there is none."""
    axes: Mapping[str, World]
    """The axes larger than 1, by name."""
    without_shared_memory: Mapping[str, str]
    """Data axis -> why some or all of its ranks do not share memory."""

    @classmethod
    def of(cls, world: World, plan: Plan) -> Mesh:
        """Place the processes on the axes of a resolved plan. Every rank calls it: it makes process
        groups."""
        sizes = {
            axis: int(getattr(plan, axis)) for axis in ("pipeline", "replicate", "shard", "tensor")
        }
        sizes = {axis: size for axis, size in sizes.items() if size > 1}
        atexit.unregister(_at_exit)  # a single handler serves all meshes
        atexit.register(_at_exit)
        if not sizes or sizes.get("replicate") == world.size:
            torch_mesh, axes = None, {"replicate": world} if sizes else {}
        else:
            torch_mesh, groups = _made(world, tuple(sizes.items()))
            axes = {axis: _part(world, group) for axis, group in groups.items()}
        axes, reasons = _with_shared_memory(world, plan, axes)
        data = axes.pop("data", None) or next(
            (axes[axis] for axis in DATA_AXES if axis in axes), _alone(world)
        )
        return cls(
            world,
            data,
            MicrobatchAssignment(data.size, round_robin="shard" in sizes),
            torch_mesh,
            axes,
            reasons,
        )

    def close(self) -> None:
        """Release the shared memory."""
        for each in (self.data, *self.axes.values()):
            for made in (each.shared_memory, each.hierarchy):
                if made is not None:
                    made.close()

    def axis(self, name: str) -> World:
        """Return the processes along one axis, this one among them."""
        return self.axes.get(name) or _alone(self.world)

    def split(self, slices: int) -> Mesh:
        """Return the mesh with each microbatch split into `slices` among the ranks of `data`."""
        return replace(
            self, assignment=MicrobatchAssignment(self.data.size, round_robin=True, slices=slices)
        )

    def assigned(self, assignment: MicrobatchAssignment) -> Mesh:
        """Return the mesh with another assignment of the microbatches to the ranks of `data`."""
        return self if assignment == self.assignment else replace(self, assignment=assignment)

    def in_order(self, rows: Tensor, count: int) -> Tensor:
        """All-gather one row per microbatch, in their order: (count, ...). Every rank of `data`
        calls it."""
        everyone = self.data.gather_rows(
            rows, [len(share) for share in self.assignment.indices_by_rank(count)]
        )
        if not self.assignment.round_robin:
            return everyone
        positions = torch.tensor(self.assignment.gathered_positions(count))
        if accelerator.has_streams(everyone.device):
            positions = positions.pin_memory().to(everyone.device, non_blocking=True)
        return everyone[positions.to(everyone.device)]

    def union(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state dict of the whole model, of which a rank of a pipeline has a part. Every
        rank calls it."""
        pipeline = self.axis("pipeline")
        return state if pipeline.size == 1 else PipelineStateDict(state, pipeline)

    def samples_in_order(self, rows: Tensor | None, sizes: Sequence[int]) -> Tensor:
        """All-gather one row per sample on the CPU, in the order of the samples. Every rank of
        `data` calls it. `rows`: this rank's; None if it has none. `sizes`: the number of samples in
        each microbatch."""
        everyone = self.data.gather_ragged(rows)
        if not self.assignment.round_robin:
            return everyone
        parts = torch.split(
            everyone,
            [
                sizes[place]
                for share in self.assignment.indices_by_rank(len(sizes))
                for place in share
            ],
        )
        return torch.cat([parts[place] for place in self.assignment.gathered_positions(len(sizes))])


class PipelineStateDict(Mapping[str, Tensor]):
    """The state dict of a model in pipeline stages: name -> full tensor, on every rank. Every rank
    makes it and reads the same entries in the same order: reading an entry is a broadcast. Iterates
    in the order of names."""

    def __init__(self, mine: Mapping[str, Any], pipeline: World) -> None:
        self._mine = mine
        self._pipeline = pipeline
        mine_described = {
            name: [str(t.dtype).removeprefix("torch."), list(t.shape)]
            for name, t in mine.items()
            if isinstance(t, Tensor)
        }
        self._owners: dict[str, tuple[int, str, list[int]]] = {}
        for rank, theirs in enumerate(pipeline.gather_values(mine_described)):
            for name, (dtype, shape) in theirs.items():
                self._owners.setdefault(name, (rank, dtype, shape))

    def __getitem__(self, name: str) -> Tensor:
        owner, dtype, shape = self._owners[name]
        if self._pipeline.rank == owner:
            tensor = full_tensor(self._mine[name].detach()).to(self._pipeline.device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._pipeline.device)
        sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        dist.broadcast(
            sent.reshape(-1).view(torch.uint8), group=self._pipeline.group, group_src=owner
        )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._owners))

    def __len__(self) -> int:
        return len(self._owners)


_meshes: dict[Any, tuple[DeviceMesh, Mapping[str, Any]]] = {}
"""Meshes with their groups, each made once for the life of the process group: torch caches the
meshes of distributed tensors, and confuses equal ones."""


def _made(world: World, sizes: tuple[tuple[str, int], ...]) -> tuple[DeviceMesh, Mapping[str, Any]]:
    """Return torch's mesh of these axes, and the process groups of the axes by name: `data` too,
    for both data axes as one, if both are among them.

    The groups are made here. A mesh that makes its own splits them from a group that is bound to a
    device, and gives Gloo the options of NCCL (torch 2.13 to 2.15): its half then has neither the
    timeout nor the network interface.
    """
    from torch.distributed.device_mesh import DeviceMesh

    set_item_of_distributed(lambda tensor: full_tensor(tensor.detach()).item())
    key = (dist.group.WORLD, sizes)
    if key not in _meshes:
        axes = [axis for axis, _ in sizes]
        ranks = torch.arange(world.size).view([size for _, size in sizes])
        groups = {axis: _group(ranks, [place], axis) for place, axis in enumerate(axes)}
        mesh = DeviceMesh.from_group(
            list(groups.values()), world.device.type, ranks, mesh_dim_names=tuple(axes)
        )
        shared = [place for place, axis in enumerate(axes) if axis in DATA_AXES]
        if len(shared) > 1:
            groups["data"] = _group(ranks, shared, "data")
        _meshes[key] = mesh, groups
    return _meshes[key]


def _group(ranks: Tensor, dims: Sequence[int], axis: str) -> Any:
    """Return the process group of this rank along `dims` of the mesh `ranks`. Every rank calls it.

    All ranks make each group, one after another. With `use_local_synchronization` each would make
    its own alone, and torch would name a group by how many the rank has: members with other
    numbers, as after groups that a script made of some ranks, would wait for each other in vain.
    """
    size = math.prod(ranks.shape[dim] for dim in dims)
    rows = ranks.movedim(list(dims), list(range(-len(dims), 0))).reshape(-1, size).tolist()
    if len(rows) == 1:
        return dist.group.WORLD
    own, _ = dist.new_subgroups_by_enumeration(rows, timeout=TIMEOUT, group_desc=f"mesh_{axis}")  # type: ignore[no-untyped-call]
    return own


def _with_shared_memory(
    world: World, plan: Plan, axes: Mapping[str, World]
) -> tuple[dict[str, World], dict[str, str]]:
    """Give the data axes shared memory. Returns all axes, and the reasons for those that have none
    on some ranks."""
    with_memory, mine, hierarchies = (
        dict(axes),
        dict[str, str](),
        dict[str, HierarchicalAllReduce](),
    )
    names = [name for name in ("data", *DATA_AXES) if name in axes and world.device.type == "cpu"]
    if plan.transport == "torch" or not names:
        return with_memory, dict.fromkeys(names, "the plan says transport=torch")
    for name in names:
        group = axes[name].group or dist.group.WORLD
        made = SharedMemoryGroup.create(group)
        if isinstance(made, SharedMemoryGroup):
            with_memory[name] = replace(axes[name], shared_memory=made)
            continue
        mine[name] = made.reason
        if (
            made.hosts
            and plan.numerics == "fast"
            and isinstance(
                hierarchy := HierarchicalAllReduce.create(group, made.hosts), HierarchicalAllReduce
            )
        ):
            mine[name] += (
                "; the ranks of each host share memory, and one leader per host sums over the hosts"
            )
            hierarchies[name] = hierarchy
            with_memory[name] = replace(axes[name], hierarchy=hierarchy)
    everyone = world.gather_values([mine, [each.leaders for each in hierarchies.values()]])
    HierarchicalAllReduce.connect(
        sorted({tuple(leaders) for _, several in everyone for leaders in several}),
        hierarchies.values(),
    )
    return with_memory, {
        name: reason for reasons, _ in everyone for name, reason in reasons.items()
    }


def forget_meshes() -> None:
    """Drop all meshes and process groups, and close their sockets, before the default group is
    destroyed."""
    forget_leader_groups()
    for mesh, _ in _meshes.values():
        forget_process_groups(mesh)
    _meshes.clear()


def _at_exit() -> None:
    """Drop the meshes first. The default group's threads end with the last reference to the group,
    and modules hold references to it in cycles."""
    forget_meshes()
    gc.collect()


def _alone(world: World) -> World:
    return replace(world, rank=0, size=1, owns_group=False)


def _part(world: World, group: Any) -> World:
    return replace(world, rank=group.rank(), size=group.size(), owns_group=False, group=group)


def shard_as(like: Tensor, full: Tensor) -> Tensor:
    """Return this rank's part of a full tensor that is distributed as `like`, without
    communication."""
    if not hasattr(like, "full_tensor"):
        return full
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor. Every rank of its mesh calls it, in the same order."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(tensor, DTensor)
    # collectives run there; an offloaded part is on the CPU
    gathered: Any = tensor.to(tensor.device_mesh.device_type)
    placements = list(tensor.placements)
    # one axis at a time: torch warns of gathers that it cannot merge
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        gathered = gathered.redistribute(placements=placements)
    full: Tensor = gathered.to_local()
    return full
