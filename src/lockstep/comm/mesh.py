"""The device mesh of a run, and its process groups. The mesh has one dim for each axis of the plan,
such as `replicate`, `shard`, `tensor` or `pipeline`."""

from __future__ import annotations

import atexit
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.dtypes import tensor_spec, torch_dtype
from lockstep.base.torch_private import (
    forget_process_groups,
    set_item_of_distributed,
    to_local as to_local,
)
from lockstep.comm.devices import TIMEOUT
from lockstep.comm.hierarchical import HierarchicalAllReduce, forget_leader_groups
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.comm.world import World
from lockstep.plan import Axis, Divided, Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Mesh:
    """The process groups of this rank along the axes of the plan."""

    world: World
    larger: Sequence[Axis]
    torch_mesh: DeviceMesh | None
    """Torch's `DeviceMesh` of the run. Axes over which FSDP2 shards parameters together are one
    dim, such as `shard_context`. None if there is at most one axis and no parameter is sharded."""
    expert_mesh: DeviceMesh | None
    """Torch's `DeviceMesh` for the parameters of experts. `expert_mesh` differs from `torch_mesh`
    if the plan has both `shard` and `expert`, because the axis `expert` distributes whole
    experts."""
    groups: Mapping[tuple[str, ...], World]
    """The processes along one axis or along several axes, by the names of the axes."""
    without_shared_memory: Mapping[str, str]
    """The reason why some ranks of an axis do not share memory, by axis."""
    bitwise: bool = False
    """True if the ranks that divide a microbatch's tokens sum gradients in the backward of each
    microbatch (numerics=bitwise)."""
    alone: World = field(init=False)
    data: World = field(init=False)
    """The data-parallel ranks, which together compute all microbatches of a step."""
    replicas: World = field(init=False)
    """The ranks that hold the same parameters and optimizer state."""
    stages: World = field(init=False)
    """The ranks of this rank's pipeline, which together hold all layers of the model."""
    tokens: World = field(init=False)
    """The ranks that divide the tokens of each microbatch (the axis `context`)."""
    loss_parts: World = field(init=False)
    """The ranks that each compute a part of a microbatch's loss."""
    parts: World = field(init=False)
    """The ranks over which FSDP2 shards the parameters of a pipeline stage. Without sharding, the
    ranks over which experts are distributed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "alone", replace(self.world, rank=0, size=1, owns_group=False))
        for name, axes in (
            ("data", _dividing("microbatches", self.larger)),
            ("replicas", _with_same_state(self.larger)),
            ("stages", _dividing("layers", self.larger)),
            ("tokens", _dividing("tokens", self.larger)),
            ("parts", _sharded(self.larger) or _dividing("experts", self.larger)),
        ):
            object.__setattr__(self, name, self._along(axes))
        object.__setattr__(self, "loss_parts", self.alone if self.bitwise else self.tokens)

    @classmethod
    def of(cls, world: World, plan: Plan) -> Mesh:
        """Make the mesh of a plan, in which every axis has a size. Every rank must call this
        method, because it makes process groups."""
        atexit.unregister(_at_exit)  # register only one handler
        atexit.register(_at_exit)
        larger = plan.larger
        together = [
            _dividing("microbatches", larger),
            _with_same_state(larger),
            _dividing("layers", larger),
            _dividing("tokens", larger),
            _summed(larger),
            _summed(larger, of_expert=True),
            _sharded(larger),
            _sharded_experts(larger),
            _copies_of_dense(larger),
        ]
        wanted = tuple(dict.fromkeys([*((axis.name,) for axis in larger), *filter(None, together)]))
        torch_mesh = expert_mesh = None
        if len(larger) < 2 and all(axis.same_state for axis in larger):
            groups = dict.fromkeys(wanted, world)
        else:
            sizes = tuple((axis.name, plan.size(axis)) for axis in larger)
            dims = [
                _dims(larger, sharded) for sharded in (_sharded(larger), _sharded_experts(larger))
            ]
            (torch_mesh, expert_mesh), made = _make_meshes(world, sizes, wanted, tuple(dims))
            groups = {names: _part(world, group) for names, group in made.items()}
        groups, reasons = _with_shared_memory(
            world, plan, groups, data=_dividing("microbatches", larger), summed=_summed(larger)
        )
        bitwise = plan.numerics == "bitwise"
        return cls(world, larger, torch_mesh, expert_mesh, groups, reasons, bitwise)

    def close(self) -> None:
        for each in self.groups.values():
            for made in (each.shared_memory, each.hierarchy):
                if made is not None:
                    made.close()

    def axis(self, name: str) -> World:
        return self.groups.get((name,)) or self.alone

    def _along(self, names: tuple[str, ...]) -> World:
        return self.groups[names] if names else self.alone

    def summed(self, parameter: Tensor | None = None) -> World:
        """Return the processes over which a parameter's gradient is summed after the backward. With
        `None`, the parameter belongs to no expert."""
        is_expert = parameter is not None and self.is_expert(parameter)
        axes = [axis for axis in self.larger if self.sums_over(axis)]
        return self._along(_summed(axes, of_expert=is_expert))

    def sums_over(self, axis: Axis) -> bool:
        return axis.sums == "all" and not (self.bitwise and "tokens" in axis.divides)

    def is_expert(self, parameter: Tensor) -> bool:
        dims = _divided_dims(parameter)
        return any(name in dims for name in _dividing("experts", self.larger))

    def shards(self, parameter: Tensor | None = None) -> World:
        """Return the processes over which FSDP2 shards a parameter. With `None`, the parameter
        belongs to no expert."""
        is_expert = parameter is not None and self.is_expert(parameter)
        return self._along((_sharded_experts if is_expert else _sharded)(self.larger))

    def shard_mesh(self, parameter: Tensor | None = None) -> DeviceMesh:
        is_expert = parameter is not None and self.is_expert(parameter)
        names = (_sharded_experts if is_expert else _sharded)(self.larger)
        torch_mesh = self.expert_mesh if is_expert else self.torch_mesh
        assert torch_mesh is not None
        return torch_mesh[_JOIN.join(names)]

    def copies(self, tensor: Tensor) -> World:
        """Return the ranks that hold the same part of a parameter or optimizer state as this
        rank."""
        if self.is_expert(tensor):
            return self.replicas
        return self._along(_copies_of_dense(self.larger))

    def is_first(self, tensor: Tensor) -> bool:
        divided = divided_over(tensor)
        return all(
            axis.name in divided or "layers" in axis.divides or self.axis(axis.name).rank == 0
            for axis in self.larger
        )

    def union(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state dict of the whole model from the state dicts of all pipeline stages.
        Every rank must call this method."""
        return state if self.stages.size == 1 else PipelineStateDict(state, self.stages)


def _dividing(what: Divided, axes: Sequence[Axis]) -> tuple[str, ...]:
    return tuple(axis.name for axis in axes if what in axis.divides)


def _with_same_state(axes: Sequence[Axis]) -> tuple[str, ...]:
    return tuple(axis.name for axis in axes if axis.same_state)


def _summed(axes: Sequence[Axis], *, of_expert: bool = False) -> tuple[str, ...]:
    return tuple(
        axis.name
        for axis in axes
        if axis.sums == "all" and not (of_expert and "experts" in axis.divides)
    )


def _sharded(axes: Sequence[Axis]) -> tuple[str, ...]:
    if not _dividing("parameters", axes):
        return ()
    return tuple(axis.name for axis in axes if axis.shards_parameters)


def _sharded_experts(axes: Sequence[Axis]) -> tuple[str, ...]:
    experts = _dividing("experts", axes)
    return tuple(name for name in _sharded(axes) if name not in experts)


def _copies_of_dense(axes: Sequence[Axis]) -> tuple[str, ...]:
    copied = {*_with_same_state(axes), *(() if _sharded(axes) else _dividing("experts", axes))}
    return tuple(axis.name for axis in axes if axis.name in copied)


def _dims(axes: Sequence[Axis], sharded: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    dims: list[tuple[str, ...]] = [(axis.name,) for axis in axes if axis.name not in sharded]
    if sharded:
        at = next(place for place, axis in enumerate(axes) if axis.name in sharded)
        dims.insert(at, sharded)
    return tuple(dims)


_JOIN = "_"


def divided_over(tensor: Tensor) -> set[str]:
    """Return the names of the axes over which a DTensor is sharded. Empty for a plain tensor."""
    return {axis for dim in _divided_dims(tensor) for axis in dim.split(_JOIN)}


def _divided_dims(tensor: Tensor) -> list[str]:
    names = getattr(getattr(tensor, "device_mesh", None), "mesh_dim_names", None) or ()
    placements = getattr(tensor, "placements", ())
    return [name for name, at in zip(names, placements, strict=True) if not at.is_replicate()]


def shard_dim_over(tensor: Tensor, axis: str) -> int | None:
    names = getattr(getattr(tensor, "device_mesh", None), "mesh_dim_names", None) or ()
    placements: Any = getattr(tensor, "placements", ())
    placement = dict(zip(names, placements, strict=True)).get(axis)
    return None if placement is None or placement.is_replicate() else int(placement.dim)


class PipelineStateDict(Mapping[str, Tensor]):
    """The state dict of a model in pipeline stages, with full tensors on every rank. Reading an
    entry is a broadcast, so every rank reads the same entries in the same order."""

    def __init__(self, mine: Mapping[str, Any], pipeline: World) -> None:
        self._mine = mine
        self._pipeline = pipeline
        described = {
            name: tensor_spec(value) for name, value in mine.items() if isinstance(value, Tensor)
        }
        self._owners: dict[str, tuple[int, str, list[int]]] = {}
        for rank, theirs in enumerate(pipeline.gather_values(described)):
            for name, (dtype, shape) in theirs.items():
                self._owners.setdefault(name, (rank, dtype, shape))

    def __getitem__(self, name: str) -> Tensor:
        owner, dtype, shape = self._owners[name]
        if self._pipeline.rank == owner:
            tensor = full_tensor(self._mine[name].detach()).to(self._pipeline.device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=torch_dtype(dtype), device=self._pipeline.device)
        sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        dist.broadcast(
            sent.reshape(-1).view(torch.uint8), group=self._pipeline.group, group_src=owner
        )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._owners))

    def __len__(self) -> int:
        return len(self._owners)


_meshes: dict[Any, tuple[list[DeviceMesh], Mapping[tuple[str, ...], Any]]] = {}
"""Keeps each mesh that was made. A second equal mesh would be confused with the first in torch's
cache of DTensor operations."""
_Dims = tuple[tuple[str, ...], ...]


def _make_meshes(
    world: World,
    sizes: tuple[tuple[str, int], ...],
    wanted: tuple[tuple[str, ...], ...],
    meshes: tuple[_Dims, ...],
) -> tuple[list[DeviceMesh], Mapping[tuple[str, ...], Any]]:
    """Make the meshes from process groups that lockstep has made. If torch made the groups, it
    would split the groups from a group with a bound device. A Gloo group that is split from a bound
    group gets NCCL's options, and loses the timeout and network interface (torch 2.13 to 2.15)."""
    from torch.distributed.device_mesh import DeviceMesh

    set_item_of_distributed(lambda tensor: full_tensor(tensor.detach()).item())
    key = (dist.group.WORLD, sizes, wanted, meshes)
    if key not in _meshes:
        axes = [axis for axis, _ in sizes]
        ranks = torch.arange(world.size).view([size for _, size in sizes])
        groups = {
            names: _group(ranks, [axes.index(name) for name in names], _JOIN.join(names))
            for names in wanted
        }
        made = {
            dims: DeviceMesh.from_group(
                [groups[names] for names in dims],
                world.device.type,
                _merged(ranks, [[axes.index(name) for name in names] for names in dims]),
                mesh_dim_names=tuple(_JOIN.join(names) for names in dims),
            )
            for dims in dict.fromkeys(meshes)
        }
        _meshes[key] = [made[dims] for dims in meshes], groups
    return _meshes[key]


def _merged(ranks: Tensor, dims: Sequence[Sequence[int]]) -> Tensor:
    ordered = ranks.permute([dim for several in dims for dim in several])
    return ordered.reshape([math.prod(ranks.shape[dim] for dim in several) for several in dims])


def _group(ranks: Tensor, dims: Sequence[int], axis: str) -> Any:
    """Make all process groups of an axis on all ranks, and return this rank's group.
    `use_local_synchronization` is not used, because it names a group by the number of groups that a
    rank has. After a script has made groups of some ranks, the names would differ, and the ranks
    would wait forever."""
    size = math.prod(ranks.shape[dim] for dim in dims)
    rows = ranks.movedim(list(dims), list(range(-len(dims), 0))).reshape(-1, size).tolist()
    if len(rows) == 1:
        return dist.group.WORLD
    own, _ = dist.new_subgroups_by_enumeration(rows, timeout=TIMEOUT, group_desc=f"mesh_{axis}")  # type: ignore[no-untyped-call]
    return own


def _with_shared_memory(
    world: World,
    plan: Plan,
    groups: Mapping[tuple[str, ...], World],
    *,
    data: tuple[str, ...],
    summed: tuple[str, ...],
) -> tuple[dict[tuple[str, ...], World], dict[str, str]]:
    """Give shared memory to groups. Also returns the reason why the ranks of an axis cannot share
    memory."""
    with_memory = dict(groups)
    mine, hierarchies = dict[str, str](), dict[str, HierarchicalAllReduce]()
    by_label = {
        "data" if len(names) > 1 and names == data else "_".join(names): names
        for names in groups
        if world.device.type == "cpu" and set(names) <= set(summed)
    }
    if plan.transport == "torch" or not by_label:
        return with_memory, dict.fromkeys(by_label, "the plan says transport=torch")
    for name, names in by_label.items():
        group = groups[names].group or dist.group.WORLD
        made = SharedMemoryGroup.create(group)
        if isinstance(made, SharedMemoryGroup):
            with_memory[names] = replace(groups[names], shared_memory=made)
            continue
        mine[name] = made.reason
        if not made.hosts or plan.numerics != "fast":
            continue
        hierarchy = HierarchicalAllReduce.create(group, made.hosts)
        if isinstance(hierarchy, HierarchicalAllReduce):
            mine[name] += (
                "; the ranks of each host share memory, and one leader per host sums over the hosts"
            )
            hierarchies[name] = hierarchy
            with_memory[names] = replace(groups[names], hierarchy=hierarchy)
    everyone = world.gather_values([mine, [each.leaders for each in hierarchies.values()]])
    leaders = {tuple(each) for _, several in everyone for each in several}
    HierarchicalAllReduce.connect(sorted(leaders), hierarchies.values())
    reasons = {name: reason for theirs, _ in everyone for name, reason in theirs.items()}
    return with_memory, reasons


def forget_meshes() -> None:
    """Call this function before the default process group is destroyed."""
    forget_leader_groups()
    for meshes, _ in _meshes.values():
        for mesh in meshes:
            forget_process_groups(mesh)
    _meshes.clear()


def _at_exit() -> None:
    """Drop torch's meshes before the default process group is destroyed. The threads of a group end
    when the last reference to the group is dropped."""
    forget_meshes()
    gc.collect()


def _part(world: World, group: Any) -> World:
    return replace(world, rank=group.rank(), size=group.size(), owns_group=False, group=group)


def shard_as(like: Tensor, full: Tensor) -> Tensor:
    """Shard a full tensor like the DTensor `like`, without communication."""
    if not hasattr(like, "full_tensor"):
        return full
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def like_parameter(parameter: Tensor, part: Tensor) -> Tensor:
    """Return this rank's part of a gradient as a DTensor that is sharded like the parameter."""
    shaped = part.view_as(to_local(parameter))
    if not hasattr(parameter, "full_tensor"):
        return shaped
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        shaped,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor. Every rank of the mesh must call this function, in the same order."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(tensor, DTensor)
    # the gather runs on the device, but an offloaded part is on the CPU
    gathered: Any = tensor.to(tensor.device_mesh.device_type)
    placements = list(tensor.placements)
    # one axis at a time, because torch warns of gathers that it cannot merge
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        gathered = gathered.redistribute(placements=placements)
    full: Tensor = gathered.to_local()
    return full
