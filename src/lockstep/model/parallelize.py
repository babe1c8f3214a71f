"""Parallelizes a model in place over the axes of a plan, such as shard, tensor and pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.base.errors import PlanError
from lockstep.comm.mesh import Mesh
from lockstep.model.block_inputs import sum_in_blocks
from lockstep.model.block_wrappers import checkpoint_activations, compile_forward
from lockstep.model.blocks import blocks_of, is_within
from lockstep.model.chunked_logits import chunk_logits, head_name, modules_with_weights_of
from lockstep.model.device_split import (
    devices_of,
    gpus_of,
    layers_of,
    split_over_devices,
    wrap_data_parallel,
)
from lockstep.model.expert.divide import (
    check_divisible,
    check_parts,
    compute_by_rows,
    divide_experts,
    use_eager,
)
from lockstep.model.expert.find import Experts, find_experts, stacked_experts
from lockstep.model.expert.leaves import Leaves
from lockstep.model.initialization.initial_model import InitialModel
from lockstep.model.pipeline.stages import (
    STAGES_PER_RANK,
    SharedParameter,
    Stages,
    keep_only_parts,
    sequential_parts,
    shared_parameters,
)
from lockstep.model.random_streams import ModuleRandomStreams
from lockstep.model.separate_parts import SeparateParts, check_separable
from lockstep.model.shard import gather_whole, shard, shard_parts, unmark
from lockstep.model.sync_batchnorm import SyncBatchNormExchange
from lockstep.model.tensor.apply import tensor_parallel
from lockstep.model.tensor.sliced import Slices
from lockstep.model.tensor.styles import check_stage_parts, tensor_styles
from lockstep.model.weight_casts import AutocastWeights
from lockstep.plan import Plan
from lockstep.recipe.sequence import Sequence as RecipeSequence

if TYPE_CHECKING:
    from lockstep.model.context.cut import SequenceCut
    from lockstep.model.pipeline.pipeline import Pipeline


@dataclass(slots=True)
class Parallelized:
    """The objects that run a model after `parallelize` has changed the model. `shared_parameters`
    are used on several ranks of a pipeline. With bitwise numerics, `shared_parameters` also include
    parameters that several parts on one rank share."""

    streams: ModuleRandomStreams | None
    pipeline: Pipeline | None
    shared_parameters: Sequence[SharedParameter]
    cut: SequenceCut | None
    experts: Mapping[str, Experts]
    """Modules whose experts are divided over the ranks of the `expert` axis."""
    expert_leaves: Sequence[Leaves]
    """With bitwise numerics, the leaves of autograd's graph for the parameters of each divided
    module of experts."""
    separate: SeparateParts | None
    whole_experts: Sequence[str]
    eager_experts: Sequence[str]
    """Modules of transformers that compute one expert after another, so that the bits do not depend
    on the number of ranks."""
    expert_patterns: Sequence[str] | None


def parallelize(
    initial: InitialModel,
    mesh: Mesh,
    plan: Plan,
    *,
    autocast_dtype: torch.dtype | None,
    begin: Callable[[int], None],
    blocks: Sequence[str] | None,
    tensor: Mapping[str, str] | None,
    stages: Sequence[str] | None,
    sequence: RecipeSequence | None,
    head: str | None,
    experts: Sequence[str] | None,
    exchange: SyncBatchNormExchange,
) -> Parallelized:
    """Shard and split the model in place according to the plan. Every rank must call this function.
    `begin` seeds the default generators."""
    model = initial.module
    block_names = blocks_of(model, blocks)
    parts = sequential_parts(model, stages)
    streams = ModuleRandomStreams(model, parts, begin) if parts else None
    chunked = head_name(model, head, autocast_dtype) if plan.logits == "chunked" else None
    used_by_loss = set() if chunked is None else modules_with_weights_of(model, chunked)
    styles, whole_experts = _find_styles(model, mesh, plan, tensor, experts)
    # before other stages' parameters are removed
    found_experts = _find_experts(model, mesh, plan, experts)
    separates = plan.numerics == "bitwise" and bool(parts)
    shared: Sequence[SharedParameter] = ()
    if separates:
        check_separable(model, parts)
        shared = shared_parameters(model, parts, [0] * len(parts), each_part=True)
        if mesh.axis("expert").size > 1:
            check_parts([each.name for each in shared], found_experts)

    pipeline: Pipeline | None = None
    roots = [""]
    if mesh.stages.size > 1:
        per_rank = STAGES_PER_RANK[plan.schedule]
        split_stages = Stages.split(
            model, stages, ranks=mesh.stages.size, per_rank=per_rank, bitwise=separates
        )
        check_stage_parts(styles, split_stages.parts)
        pipeline = _make_pipeline(model, split_stages, mesh, streams, plan)
        shared = split_stages.shared_parameters
        roots = _keep_own_stages(initial, split_stages, mesh)
        block_names = _blocks_within(roots, block_names)
        styles = {name: style for name, style in styles.items() if _is_within_any(name, roots)}
        whole_experts = [name for name in whole_experts if _is_within_any(name, roots)]
    layers = layers_of(model, blocks, parts) if plan.split != 1 else []

    sharded = mesh.axis("shard").size > 1
    # The gradients of a weight's uses are added in the precision in which the weight was gathered.
    short_dtype = autocast_dtype if sharded and plan.numerics == "fast" else None
    short = None if short_dtype is None else AutocastWeights.of(model, short_dtype)
    materialize = partial(initial.materialize, device=mesh.world.device)
    if styles:
        ranks = mesh.axis("tensor")
        of_tensor = None
        if ranks.size > 1:
            assert mesh.torch_mesh is not None
            of_tensor = mesh.torch_mesh["tensor"]
        tensor_parallel(
            model,
            of_tensor,
            styles,
            materialize=materialize,
            experts=whole_experts,
            slices=Slices(plan.slices, ranks) if plan.numerics == "bitwise" else None,
        )

    held_experts = {
        name: each for name, each in found_experts.items() if _is_within_any(name, roots)
    }
    divided, leaves, eager = _place_experts(
        model, mesh, plan, held_experts, roots, exchange, materialize=materialize
    )
    if pipeline is not None:
        pipeline.expert_leaves = leaves

    wrapped = block_names or [layer.name for layer in layers] or roots
    if chunked is not None:
        if plan.compile:
            _check_not_compiled(chunked, wrapped)
        chunk_logits(model, chunked)
    _wrap_blocks(model, wrapped, plan)
    if sharded:
        free = plan.sharding == "full"
        options: dict[str, Any] = {
            "free_after_forward": free,
            "offload": plan.offload,
            "materialize": materialize,
            "short": short,
            "keep_casts": autocast_dtype is None,  # without autocast there are no casts
            "used_after_forward": used_by_loss,
            "experts": list(divided),
        }
        if pipeline is None:
            shard(model, mesh, block_names, **options)
        else:
            parts_held = {root: _blocks_within([root], block_names) for root in roots}
            shard_parts(model, mesh, parts_held, free_root=free, **options)
        unmark(model, wrapped if plan.compile else [])
        if plan.numerics == "bitwise" and sequence is not None:
            for root in roots:
                gather_whole(model.get_submodule(root))
    elif plan.numerics == "bitwise":
        sum_in_blocks(model, map(model.get_submodule, block_names))
    materialize(model)
    if plan.split != 1:
        split_over_devices(
            model, layers, devices_of(mesh.world.device, plan.split_devices), plan.split
        )
    if plan.data_parallel != 1:
        wrap_data_parallel(model, gpus_of(mesh.world.device, plan.data_parallel))

    separate = None
    if separates:
        own = parts if pipeline is None else roots
        names = [each.name for each in shared]
        separate = SeparateParts(model, own, names, last=parts[-1])
        if pipeline is not None:
            pipeline.leaves = [leaf for each in separate.leaves.values() for leaf in each]
    cut = _sequence_cut(model, mesh, plan, sequence, pipeline, leaves, separate)
    return Parallelized(
        *(streams, pipeline, shared, cut, divided, leaves, separate),
        whole_experts=whole_experts,
        eager_experts=eager,
        expert_patterns=experts,
    )


def _find_styles(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    given: Mapping[str, str] | None,
    experts: Sequence[str] | None,
) -> tuple[Mapping[str, str], list[str]]:
    """Return the style of each module that the `tensor` axis shards, and the names of the modules
    of experts, which that axis does not shard."""
    size = mesh.axis("tensor").size
    if size == 1 and plan.slices == 1:
        return {}, []
    whole_experts = list(stacked_experts(model, experts))
    styles = tensor_styles(model, given, size, plan.slices, experts=whole_experts)
    if plan.context != 1:
        _check_styles_under_context(plan, styles)
    return styles, whole_experts


def _make_pipeline(
    model: nn.Module, stages: Stages, mesh: Mesh, streams: ModuleRandomStreams | None, plan: Plan
) -> Pipeline:
    # importing torch's schedules takes long
    from lockstep.model.pipeline.pipeline import Pipeline

    assert streams is not None, "Stages.split refuses a model without sequential parts"
    several = mesh.axis("shard"), mesh.axis("expert"), mesh.tokens
    together = [each for each in several if each.size > 1]
    return Pipeline(model, stages, mesh.stages, streams, schedule=plan.schedule, together=together)


def _find_experts(
    model: nn.Module, mesh: Mesh, plan: Plan, names: Sequence[str] | None
) -> Mapping[str, Experts]:
    if (ranks := mesh.axis("expert").size) == 1:
        return stacked_experts(model, names) if plan.numerics == "bitwise" else {}
    found = find_experts(model, names)
    check_divisible(model, found, ranks)
    return found


def _place_experts(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    found: Mapping[str, Experts],
    roots: Sequence[str],
    exchange: SyncBatchNormExchange,
    *,
    materialize: Callable[[nn.Module], None],
) -> tuple[Mapping[str, Experts], list[Leaves], list[str]]:
    ranks, bitwise = mesh.axis("expert"), plan.numerics == "bitwise"
    if ranks.size == 1:
        compute_by_rows(found, ranks, exchange)
        return {}, [], use_eager(found)
    eager = use_eager(found) if bitwise else []
    assert mesh.expert_mesh is not None
    leaves = divide_experts(
        model,
        found,
        mesh.expert_mesh["expert"],
        ranks,
        exchange,
        roots=roots,
        materialize=materialize,
        bitwise=bitwise,
    )
    return found, leaves, eager


def _sequence_cut(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    sequence: RecipeSequence | None,
    pipeline: Pipeline | None,
    leaves: Sequence[Leaves],
    separate: SeparateParts | None,
) -> SequenceCut | None:
    if mesh.tokens.size == 1 and sequence is None:
        return None
    beside = [
        mesh.axis(axis.name)
        for axis in mesh.larger
        if axis.in_forward and not {"tokens", "layers"} & set(axis.divides)
    ]
    if plan.numerics == "bitwise":
        from lockstep.model.context.chunked_sequence import ChunkedSequenceCut

        assert sequence is not None, "refused without"
        in_two = plan.schedule == "zero-bubble"
        return ChunkedSequenceCut(
            *(model, mesh.tokens, sequence, leaves, separate, pipeline, beside), in_two=in_two
        )
    from lockstep.model.context.cut import SequenceCut

    return SequenceCut(model, mesh.tokens, sequence, plan.exchange, pipeline, beside)


def _check_styles_under_context(plan: Plan, styles: Mapping[str, str]) -> None:
    for name, style in styles.items():
        if "sequence" in style:
            raise PlanError(
                f"context={plan.context} with the style {style!r} of {name!r}"
                f" (tensor={plan.tensor}); both divide the tokens of a sequence; choose colwise and"
                " rowwise in Recipe.tensor, or leave context out"
            )


def check_plan_devices(plan: Plan, home: torch.device) -> None:
    if plan.offload and home.type == "cpu":
        raise PlanError(
            "offload=yes on a CPU, where parameters already are; it moves them from a GPU; leave "
            "offload=yes out"
        )
    devices_of(home, plan.split_devices)
    if plan.data_parallel != 1:
        gpus_of(home, plan.data_parallel)


def _keep_own_stages(initial: InitialModel, stages: Stages, mesh: Mesh) -> list[str]:
    """Return the names of the modules in this rank's stages."""
    pipeline = mesh.stages
    own = stages.parts_on_rank(pipeline.rank)
    # each stage is on one rank only: another rank also computes its values, to check them
    if pipeline.size == mesh.world.size:
        initial.compute_checksums(stages.parts_on_rank((pipeline.rank + 1) % pipeline.size))
    keep_only_parts(initial.module, own)
    return own


def _wrap_blocks(model: nn.Module, names: Sequence[str], plan: Plan) -> None:
    for name in names:
        block = model.get_submodule(name)
        if plan.compile:
            compile_forward(block, bitwise=plan.numerics == "bitwise")
        if plan.checkpointing != "none":
            # "full" if compiled: compiled code ignores kept results, and writes results in place
            checkpoint_activations(block, "full" if plan.compile else plan.checkpointing)


def _check_not_compiled(head: str, compiled: Sequence[str]) -> None:
    for name in compiled:
        if is_within(head, name):
            what = f"the block {name!r}" if name else "the whole model"
            raise PlanError(
                f"compile=yes with logits=chunked; {what} is compiled, with the head {head!r} in"
                " it, whose output is no plain tensor; name blocks without the head in"
                " Recipe.blocks, or leave compile=yes out"
            )


def _is_within_any(name: str, parts: Sequence[str]) -> bool:
    return any(is_within(name, part) for part in parts)


def _blocks_within(parts: Sequence[str], blocks: Sequence[str]) -> list[str]:
    found = []
    for part in parts:
        if any(part.startswith(f"{block}.") for block in blocks):
            found.append(part)
        else:
            found += [block for block in blocks if is_within(block, part)]
    return found
