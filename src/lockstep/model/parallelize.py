"""A model built, and put onto the axes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.errors import PlanError
from lockstep.base.torch_private import own_buffers, own_parameters
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import World
from lockstep.model.blocks import blocks_of
from lockstep.model.consistency import check_checksums, check_structure, checksum, checksums_of
from lockstep.model.data_parallel import cut_over, gpus_of
from lockstep.model.deferred_init import CannotDefer, Deferred, build
from lockstep.model.device_split import devices_of, layers_of, split
from lockstep.model.pipeline.pipeline import PER_RANK, Pipeline
from lockstep.model.pipeline.stages import Stages, Tied, keep_only, parts_of
from lockstep.model.random_streams import Streams
from lockstep.model.shard import shard, shard_parts
from lockstep.model.tensor.apply import tensor_parallel
from lockstep.model.tensor.styles import check_inside, styles_of
from lockstep.model.wrap import compile_forward, recompute
from lockstep.plan import Plan


@dataclass(slots=True)
class Built:
    """A model as its factory made it: with all its values, or with none that a shard would have to throw away again."""

    module: Any
    deferred: Deferred | None
    """What computes the values, one tensor after another. None: they are there."""
    reason: str | None
    """Why they are there where the plan would rather not have them."""

    checksums: dict[str, int] = field(default_factory=dict)
    """Of the values that this rank has seen, by name, where there are other ranks."""
    given: frozenset[str] = frozenset()
    """The first names of parameters and buffers that will have other values: none are computed for them."""

    @classmethod
    def of(cls, factory: Callable[[], Any], key: int, mesh: Mesh) -> Built:
        """The values follow from `key` alone, not from the plan. Every rank calls it.

        Raises `RecipeError` where ranks have built models of other parts.
        """
        built = cls._built(factory, key, mesh)
        check_structure(built.module, mesh.world)
        if built.deferred is None and mesh.world.size > 1:
            built.checksums = checksums_of(built.module)
        return built

    @classmethod
    def _built(cls, factory: Callable[[], Any], key: int, mesh: Mesh) -> Built:
        if mesh.torch_mesh is None:
            return cls(build(factory, key), None, None)
        deferred, reason = None, None
        try:
            deferred = Deferred.build(factory, key)
        except CannotDefer as error:
            reason = str(error)
        refused = mesh.world.any(deferred is None)
        if deferred is not None and not refused:
            return cls(deferred.module, deferred, None)
        reasons = [reason for reason in mesh.world.gather_values(reason) if reason is not None]
        return cls(build(factory, key), None, reasons[0])

    def fill(self, part: nn.Module, device: torch.device) -> None:
        """Give the parameters and buffers of a part of the model that are still empty their values, wherever in the model they stand."""
        if self.deferred is None:
            return
        empty = {id(tensor): tensor for tensor in (*part.parameters(), *part.buffers()) if tensor.is_meta}
        values = {number: self._value(tensor, self.deferred, device) for number, tensor in empty.items()}
        for module in self.module.modules():
            tensors: tuple[dict[str, Any], ...] = own_parameters(module), own_buffers(module)
            for named in tensors:
                named.update({name: values[id(tensor)] for name, tensor in named.items() if id(tensor) in values})

    def look_at(self, parts: Iterable[str]) -> None:
        """Compute the values of these parts only to compare them with those of the rank that is to hold them."""
        if self.deferred is not None:
            for part in parts:
                module = self.module.get_submodule(part)
                for tensor in (*module.parameters(), *module.buffers()):
                    if (name := self.deferred.names[id(tensor)]) not in self.given:
                        self.checksums[name] = checksum(self.deferred.materialise(tensor))

    def check_values(self, world: World) -> None:
        """Raises `RecipeError`, on every rank alike, where two ranks have computed other values for one tensor. Every rank calls it."""
        check_checksums(self.checksums, world)

    def _value(self, tensor: Tensor, deferred: Deferred, device: torch.device) -> Tensor:
        if (name := deferred.names[id(tensor)]) in self.given:
            value = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        else:
            value = deferred.materialise(tensor)
            self.checksums[name] = checksum(value)
            value = value.to(device)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, tensor.requires_grad)
        value.__class__ = tensor.__class__
        value.__dict__.update(tensor.__dict__)
        return value


@dataclass(slots=True)
class LaidOut:
    """What runs a model that is laid out."""

    streams: Streams | None
    """Its parts' random streams, where it is known which modules these are."""
    pipeline: Pipeline | None
    tied: Sequence[Tied]
    """Parameters that several ranks of the pipeline hold."""


def lay_out(
    built: Built,
    mesh: Mesh,
    plan: Plan,
    *,
    begin: Callable[[int], None],
    blocks: Sequence[str] | None,
    tensor: Mapping[str, str] | None,
    stages: Sequence[str] | None,
) -> LaidOut:
    """Change the model in place, so that this rank holds and computes what the plan gives it. Every rank calls it.

    `begin`: starts random generators from a key. `blocks`, `tensor` and `stages`: as in `Recipe`. Raises `RecipeError`.
    """

    def fill(part: nn.Module) -> None:
        built.fill(part, mesh.world.device)

    model = built.module
    names = blocks_of(model, blocks)
    parts = parts_of(model, stages)
    laid = LaidOut(Streams(model, parts, begin) if parts else None, None, ())
    styles = styles_of(model, tensor, mesh.axis("tensor").size) if mesh.axis("tensor").size > 1 else {}
    roots = [""]
    if (pipeline := mesh.axis("pipeline")).size > 1:
        cut = Stages.of(model, stages, ranks=pipeline.size, per_rank=PER_RANK[plan.schedule])
        assert laid.streams is not None, "Stages.of has found parts"
        shards = mesh.axis("shard") if mesh.axis("shard").size > 1 else None
        laid.pipeline = Pipeline(model, cut, pipeline, laid.streams, schedule=plan.schedule, shards=shards)
        laid.tied = cut.tied
        check_inside(styles, cut.parts)
        roots = cut.names_on(pipeline.rank)
        if pipeline.size == mesh.world.size:  # elsewhere other ranks hold the same stages
            built.look_at(cut.names_on((pipeline.rank + 1) % pipeline.size))
        keep_only(model, roots)
        names = _within(roots, names)
        styles = {name: style for name, style in styles.items() if any(f"{name}.".startswith(f"{root}.") for root in roots)}
    layers = layers_of(model, blocks, parts) if plan.split != 1 else []
    if styles:
        assert mesh.torch_mesh is not None
        tensor_parallel(model, mesh.torch_mesh["tensor"], styles, fill=fill)
    for name in names or [layer.name for layer in layers] or roots:
        block = model.get_submodule(name)
        if plan.compile:
            compile_forward(block)
        if plan.checkpointing != "none":
            recompute(block, plan.checkpointing)
    if mesh.axis("shard").size > 1:
        free = plan.sharding == "full"
        if laid.pipeline is None:
            shard(model, mesh, names, free_after_forward=free, offload=plan.offload, fill=fill)
        else:
            inside = {root: _within([root], names) for root in roots}
            shard_parts(model, mesh, inside, free_after_forward=free, free_root=free, offload=plan.offload, fill=fill)
    fill(model)
    if plan.split != 1:
        split(model, layers, devices_of(mesh.world.device, plan.split_devices), plan.split)
    if plan.data_parallel != 1:
        cut_over(model, gpus_of(mesh.world.device, plan.data_parallel))
    return laid


def check_devices(plan: Plan, home: torch.device) -> None:
    """Raises `PlanError` where the devices of a process are not those that the plan takes. `home`: the first."""
    if plan.offload and home.type == "cpu":
        raise PlanError(
            "offload=yes on a CPU; it keeps on the CPU what a GPU has no room for; parameters are on the CPU already; leave offload=yes out"
        )
    devices_of(home, plan.split_devices)
    if plan.data_parallel != 1:
        gpus_of(home, plan.data_parallel)


def _within(parts: Sequence[str], blocks: Sequence[str]) -> list[str]:
    """The blocks that lie in some of these parts; of a block that holds parts, these."""
    found = []
    for part in parts:
        held = any(part.startswith(f"{block}.") for block in blocks)
        found += [part] if held else [block for block in blocks if f"{block}.".startswith(f"{part}.")]
    return found
