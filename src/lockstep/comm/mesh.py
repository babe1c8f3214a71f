"""The processes of a run laid out on the axes of its plan."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.assignment import MicrobatchAssignment
from lockstep.base.torch_private import flatten_mesh, forget_process_groups
from lockstep.base.torch_private import to_local as to_local
from lockstep.comm.hosts import Hosts, forget_hosts
from lockstep.comm.shared_memory import SharedGroup
from lockstep.comm.world import World
from lockstep.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA_AXES = ("replicate", "shard")
"""The axes whose ranks compute different microbatches."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Where this rank stands on the axes, outermost first: pipeline, replicate, shard, tensor. Every rank makes it alike."""

    world: World
    """All processes."""
    data: World
    """Those with which this one shares out the microbatches: at the same place of the other axes."""
    assignment: MicrobatchAssignment
    """Who of `data` takes which microbatches."""
    torch_mesh: DeviceMesh | None
    """Torch's, of the axes that are larger than 1, by name. None where that is only `replicate`, or none."""
    axes: Mapping[str, World]
    """Those that are larger than 1, by name."""
    apart: Mapping[str, str]
    """Why ranks of these data axes, all of them or some, do not share memory."""

    @classmethod
    def of(cls, world: World, plan: Plan) -> Mesh:
        """Lay out the processes. `plan` is resolved. Every rank calls it: it makes process groups."""
        sizes = {axis: int(getattr(plan, axis)) for axis in ("pipeline", "replicate", "shard", "tensor")}
        sizes = {axis: size for axis, size in sizes.items() if size > 1}
        atexit.unregister(_at_exit)  # or there would be one for each mesh
        atexit.register(_at_exit)
        if sizes.get("replicate", 1) == world.size:
            torch_mesh, axes = None, {"replicate": world} if sizes else {}
        else:
            torch_mesh, shared = _made(world, tuple(sizes.items()))
            axes = {axis: _part(world, torch_mesh[axis]) for axis in sizes}
            if shared is not None:
                axes["data"] = _part(world, shared)
        axes, apart = _with_memory(world, plan, axes)
        data = axes.pop("data", None) or next((axes[axis] for axis in DATA_AXES if axis in axes), _alone(world))
        return cls(world, data, MicrobatchAssignment(data.size, round_robin="shard" in sizes), torch_mesh, axes, apart)

    def close(self) -> None:
        """Give up the shared memory."""
        for each in (self.data, *self.axes.values()):
            for made in (each.memory, each.hosts):
                if made is not None:
                    made.close()

    def axis(self, name: str) -> World:
        """The processes along one axis, of which this one is one."""
        return self.axes.get(name) or _alone(self.world)

    def split(self, slices: int) -> Mesh:
        """The same processes, each microbatch split into `slices` among the ranks of `data`."""
        return replace(self, assignment=MicrobatchAssignment(self.data.size, round_robin=True, slices=slices))

    def in_order(self, rows: Tensor, count: int) -> Tensor:
        """All microbatches' rows in their order, (count, ...), from each rank's own, one a microbatch. Every rank of `data` calls it."""
        everyone = self.data.gather_rows(rows, [len(share) for share in self.assignment.indices_by_rank(count)])
        return (
            everyone[torch.tensor(self.assignment.gathered_positions(count), device=everyone.device)]
            if self.assignment.round_robin
            else everyone
        )

    def union(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state dict of the whole model, where a rank of a pipeline has part of it; see `Union`. Every rank calls it."""
        pipeline = self.axis("pipeline")
        return state if pipeline.size == 1 else Union(state, pipeline)

    def samples_in_order(self, rows: Tensor | None, sizes: Sequence[int]) -> Tensor:
        """All samples' rows in their order, on the CPU, from each rank's own; None from a rank without any. Every rank of `data` calls it.

        `sizes`: the samples of each microbatch.
        """
        everyone = self.data.gather_ragged(rows)
        if not self.assignment.round_robin:
            return everyone
        parts = torch.split(everyone, [sizes[place] for share in self.assignment.indices_by_rank(len(sizes)) for place in share])
        return torch.cat([parts[place] for place in self.assignment.gathered_positions(len(sizes))])


class Union(Mapping[str, Tensor]):
    """The tensors of a state dict of which the ranks of a pipeline have parts, by name, whole on every rank.

    Every rank makes it and reads its entries alike, one after another: reading is an exchange. Iterates in the order of names.
    """

    def __init__(self, mine: Mapping[str, Any], pipeline: World) -> None:
        self._mine = mine
        self._pipeline = pipeline
        said = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in mine.items() if isinstance(t, Tensor)}
        self._owners: dict[str, tuple[int, str, list[int]]] = {}
        for rank, theirs in enumerate(pipeline.gather_values(said)):
            for name, (dtype, shape) in theirs.items():
                self._owners.setdefault(name, (rank, dtype, shape))

    def __getitem__(self, name: str) -> Tensor:
        owner, dtype, shape = self._owners[name]
        if self._pipeline.rank == owner:
            tensor = full_tensor(self._mine[name].detach()).to(self._pipeline.device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._pipeline.device)
        sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        dist.broadcast(sent.reshape(-1).view(torch.uint8), group=self._pipeline.group, group_src=owner)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._owners))

    def __len__(self) -> int:
        return len(self._owners)


_meshes: dict[Any, tuple[DeviceMesh, DeviceMesh | None]] = {}
"""Made once for the life of the process group: torch keeps distributed tensors' meshes in caches, and takes equal ones for each other."""


def _made(world: World, sizes: tuple[tuple[str, int], ...]) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Torch's mesh of these axes; and where two of them together share out the microbatches, those as one."""
    from torch.distributed.device_mesh import init_device_mesh

    key = (dist.group.WORLD, sizes)
    if key not in _meshes:
        axes = [axis for axis, _ in sizes]
        mesh = init_device_mesh(world.device.type, tuple(size for _, size in sizes), mesh_dim_names=tuple(axes))
        shared = tuple(axis for axis in DATA_AXES if axis in axes)
        _meshes[key] = mesh, flatten_mesh(mesh[shared], "data") if len(shared) > 1 else None
    return _meshes[key]


def _with_memory(world: World, plan: Plan, axes: Mapping[str, World]) -> tuple[dict[str, World], dict[str, str]]:
    """The axes that exchange microbatches' gradients with their own shared memory; and why, for those of which some ranks have none."""
    with_memory, mine, made_hosts = dict(axes), dict[str, str](), dict[str, Hosts]()
    names = [name for name in ("data", *DATA_AXES) if name in axes and world.device.type == "cpu"]
    if plan.transport == "torch" or not names:
        return with_memory, dict.fromkeys(names, "the plan says transport=torch")
    for name in names:
        group = axes[name].group or dist.group.WORLD
        made = SharedGroup.create(group)
        if isinstance(made, SharedGroup):
            with_memory[name] = replace(axes[name], memory=made)
            continue
        mine[name] = made.reason
        if made.hosts and plan.numerics == "fast" and isinstance(hosts := Hosts.create(group, made.hosts), Hosts):
            mine[name] += "; those of one host share it, and their first ones sum what remains"
            made_hosts[name] = hosts
            with_memory[name] = replace(axes[name], hosts=hosts)
    everyone = world.gather_values([mine, [hosts.firsts for hosts in made_hosts.values()]])
    Hosts.connect(sorted({tuple(firsts) for _, several in everyone for firsts in several}), made_hosts.values())
    return with_memory, {name: reason for reasons, _ in everyone for name, reason in reasons.items()}


def forget_meshes() -> None:
    """Let go of all meshes and their process groups, whose sockets close then. For the end of a process group."""
    forget_hosts()
    for mesh, _ in _meshes.values():
        forget_process_groups(mesh)
    _meshes.clear()


def _at_exit() -> None:
    """Before the process group is taken down: its threads end only when nobody holds it, and modules on a mesh hold it in cycles."""
    forget_meshes()
    gc.collect()


def _alone(world: World) -> World:
    return replace(world, rank=0, size=1, owns_group=False)


def _part(world: World, part: DeviceMesh) -> World:
    return replace(world, rank=part.get_local_rank(), size=part.size(), owns_group=False, group=part.get_group())


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, of which this rank may hold a part. Every rank of the tensor's mesh calls it, in the same order."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(tensor, DTensor)
    gathered: Any = tensor.to(tensor.device_mesh.device_type)  # where its ranks exchange; an offloaded part is on the CPU
    placements = list(tensor.placements)
    for axis in range(len(placements)):  # one after another: torch warns of the gathers that it cannot merge
        placements[axis] = Replicate()
        gathered = gathered.redistribute(placements=placements)
    full: Tensor = gathered.to_local()
    return full
