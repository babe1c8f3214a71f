"""Traces one step of a recipe on one rank. The training code runs on tensors without storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.errors import PlanError, RecipeError
from lockstep.base.nested import map_tensors, tensors_in
from lockstep.base.temporary_folder import locked_folder
from lockstep.base.torch_private import FakeTensor, FakeTensorMode
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import World
from lockstep.data.generators import PreservedGenerators
from lockstep.hooks.out_of_memory import read_fallbacks
from lockstep.launch.environment import Environment
from lockstep.launch.termination import Termination
from lockstep.logging.recorder import Recorder
from lockstep.model.chunked_logits import ChunkedLogits, head_name
from lockstep.model.context import exchange
from lockstep.model.context.active import active
from lockstep.model.context.chunk_axis import ChunkAxis
from lockstep.model.expert.find import stacked_experts
from lockstep.model.initialization.initial_model import InitialModel
from lockstep.model.pipeline.boundary import Boundary, Chunks
from lockstep.model.pipeline.stages import STAGES_PER_RANK, Stages, sequential_parts
from lockstep.model.sync_batchnorm import training_batchnorms
from lockstep.opening import Opened, RunRequest
from lockstep.plan import Plan
from lockstep.planner.trace import REDUCED, Cause, TracedStep
from lockstep.planner.tracing.fake_world import fake_world, recorded_by
from lockstep.planner.tracing.recorder import TraceRecorder
from lockstep.planner.tracing.stand_ins import (
    GpuSemantics,
    Values,
    marked_backwards,
    unrecorded,
    with_short_first_step,
    with_values,
    without_masks,
    without_others,
    without_values,
)
from lockstep.planner.tracing.torch_fakes import (
    chunks_on_demand,
    foreach_on_the_cpu,
    group_name,
    replaced,
)
from lockstep.recipe.data import Stream
from lockstep.recipe.recipe import Recipe
from lockstep.recipe_session import RecipeSession
from lockstep.run import train_in
from lockstep.training.context import Overrides
from lockstep.training.hook import ControlHook
from lockstep.training.recovery import Recovery
from lockstep.training.reducers.ddp import DdpReducer
from lockstep.training.run import Run
from lockstep.training.train_module import TrainModule


class _Traced(Exception):
    """Ends the run after the traced step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOptions:
    rank: int = 0
    world_size: int = 1
    local_size: int = 8
    is_gpu: bool = True
    is_fake: bool = True
    """False to trace on real tensors, for a script that reads values."""
    boundaries: Sequence[Sequence[Boundary]] = ()
    skew: float = 1.0
    """Number of tokens for the first rank's experts, relative to the mean over the `expert`
    axis."""


@dataclass(frozen=True, slots=True)
class StageSplit:
    boundaries: Sequence[Sequence[Boundary]]
    """Lists the outputs of each pipeline stage but the last, for each forward."""
    kinds: Sequence[tuple[int, ...]]


def stage_split(recipe: Recipe, plan: Plan, options: TraceOptions) -> StageSplit:
    """Split the model into pipeline stages, and find the tensors that each stage sends to the
    next."""
    boundaries: dict[str, list[Boundary | Chunks]] = {}
    splits: list[Stages] = []
    ranks = int(plan.pipeline or 1)

    def watch(run: Run) -> None:
        model, per_rank = run.training.modules[0].model, STAGES_PER_RANK[plan.schedule]
        split = Stages.split(model, recipe.stages, ranks=ranks, per_rank=per_rank)
        splits.append(split)
        for part in map(split.last_part, range(len(split.ranges) - 1)):
            model.get_submodule(part).register_forward_hook(
                partial(_note_boundary, boundaries, part)
            )

    microbatch = recipe.microbatch if isinstance(recipe.microbatch, int) else recipe.global_batch
    one_microbatch = replace(recipe, global_batch=microbatch)
    context = int(plan.context or 1)
    sizes: dict[str, Any] = {**dict.fromkeys(plan.axis_sizes, 1), "context": context}
    whole = replace(plan, **sizes, offload=False)
    trace_step(one_microbatch, whole, replace(options, rank=0, world_size=context), watch)
    (split,) = splits
    passed_on = (
        [Boundary.joined(each, part) for each in boundaries[part]]
        for part in map(split.last_part, range(len(split.ranges) - 1))
    )
    return StageSplit(
        list(zip(*passed_on, strict=False)),
        [tuple(len(split.ranges[stage]) for stage in split.on_rank(rank)) for rank in range(ranks)],
    )


@dataclass(frozen=True, slots=True)
class ModelSize:
    parameter_bytes: int
    parts: int
    has_batchnorm: bool
    """True if BatchNorm computes the statistics of each microbatch."""
    has_head: bool
    experts: int
    expert_bytes: int


def model_size(recipe: Recipe) -> ModelSize:
    mesh = Mesh.of(World(0, 1, 0, 1, torch.device("cpu"), owns_group=False), Plan(replicate=1))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = InitialModel.build(recipe.model, 0, mesh, without_values=True).module
    experts = stacked_experts(model, recipe.experts).values()
    return ModelSize(
        sum(parameter.nbytes for parameter in model.parameters()),
        len(sequential_parts(model, recipe.stages)),
        bool(training_batchnorms([model])),
        _has_head(model, recipe),
        max(1, math.gcd(*(each.count for each in experts))),
        sum(part.nbytes for each in experts for part in each.module.parameters()),
    )


def _has_head(model: torch.nn.Module, recipe: Recipe) -> bool:
    try:
        head_name(model, recipe.head, None)
    except (RecipeError, PlanError):
        return False
    return True


def _note_boundary(
    found: dict[str, list[Boundary | Chunks]],
    part: str,
    module: torch.nn.Module,
    inputs: Any,
    output: Any,
) -> None:
    several, sequence = found.setdefault(part, []), active()
    boundary: Boundary | Chunks = Boundary.of(output, part)
    if sequence is not None and isinstance(axis := sequence.layout.world, ChunkAxis):
        # the chunks before it are in the list
        before = several.pop().each if axis.rank != axis.own_share.start else ()  # type: ignore[union-attr]
        boundary = Chunks((*before, boundary))
    several.append(boundary)


def trace_step(
    recipe: Recipe, plan: Plan, options: TraceOptions, watch: Callable[[Run], object] | None = None
) -> TracedStep:
    """Trace the second step on one rank. Raises the errors that a run would raise, and
    `ValueNeeded`."""
    with ExitStack() as stack:
        stack.enter_context(PreservedGenerators())
        folder = str(stack.enter_context(locked_folder("lockstep-plan-")))
        ranks = options.rank, options.world_size, options.local_size
        world = stack.enter_context(fake_world(*ranks))
        session = LoneSession(recipe, plan, world, options, folder, StepTraceHook(watch))
        try:
            with session:
                train_in(session)
        except _Traced:
            return session.hook.trace()
    raise PlanError(
        "the run ended before its first step; a plan is made from a step; give a recipe with"
        " steps=1 or more"
    )


class LoneSession(RecipeSession):
    """Runs a recipe in a process group of which only one rank exists."""

    STEPS = 3

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        world: World,
        options: TraceOptions,
        folder: str,
        hook: StepTraceHook,
    ) -> None:
        self.hook, loss = hook, recipe.loss
        if recipe.inputs is not None and loss is not None:
            loss = hook.labelled(loss)
        weight = recipe.weight and with_values(recipe.weight)
        recipe = replace(recipe, steps=self.STEPS, epochs=None, weight=weight, loss=loss)
        recipe = replace(recipe, weights=None, evaluation=None)
        shares_memory = not options.is_gpu and world.local_size == world.size
        transport = plan.transport if shares_memory else "torch"
        self._world, self._options = world, options
        self._executed = replace(plan, transport=transport, threads=1, workers=0, prefetch=2)
        super().__init__(
            recipe, plan=self._executed, run_dir=folder, log_every=1000, resume="never"
        )
        self._open = self._open_fake

    def _open_fake(
        self,
        request: RunRequest,
        termination: Termination,
        stack: ExitStack,
        recovery: Recovery | None,
    ) -> Opened:
        del recovery
        world, plan = self._world, self._executed
        mesh = Mesh.of(world, plan)
        self.hook.begin(mesh)
        recorder = Recorder(request.run_dir, world, resume="never", launched=None)
        stack.callback(recorder.close)
        overrides = Overrides(
            bare=True, without_values=self._options.is_fake, change_batch=self.hook.see_batch
        )
        context = request.context(
            world=world, mesh=mesh, plan=plan, recorder=recorder, overrides=overrides
        )
        fallbacks = read_fallbacks(world, recorder.path, resumes=False)
        self._enter_modes(stack)
        return Opened(context, Environment.read({}), (self.hook,), request, plan, fallbacks)

    def _enter_modes(self, stack: ExitStack) -> None:
        """Enter the modes in which torch computes shapes without values."""
        enter, options = stack.enter_context, self._options
        enter(recorded_by(self.hook.recorder))
        enter(self.hook.recorder.streams_and_storages())
        gathered = self.hook.recorder.labelling(exchange.gather_keys, "keys and values")
        patches = [*without_others(options.boundaries, options.skew), unrecorded()]
        patches.append((exchange, {"gather_keys": gathered}))
        patches.append(marked_backwards(self.hook.recorder))
        if self._executed.pipeline == 1 and not isinstance(self.recipe.data, Stream):
            # A schedule needs as many microbatches as stages, and a stream gives one microbatch of
            # each shard.
            patches.append(with_short_first_step())
        for owner, names in patches:
            enter(replaced(owner, **names))
        if options.is_gpu:
            enter(foreach_on_the_cpu())
            owner, names = without_masks()
            enter(replaced(owner, **names))
            enter(GpuSemantics())
        if options.is_fake:
            enter(chunks_on_demand())
            for owner, names in without_values():
                enter(replaced(owner, **names))
            self.hook.fake = enter(FakeTensorMode(allow_non_fake_inputs=True))
            enter(Values())  # type: ignore[no-untyped-call]
        # also after an error; before leaving the modes in which it was entered
        stack.callback(self.hook.end_recording)


class StepTraceHook(ControlHook):
    """Records the second step, and ends the run."""

    mesh: Mesh
    fake: FakeTensorMode | None = None

    def __init__(self, watch: Callable[[Run], object] | None = None) -> None:
        self._watch = watch
        self._stack = ExitStack()
        self._records = False
        self._tokens_per_sample: float | None = None

    def begin(self, mesh: Mesh) -> None:
        self.mesh, self.recorder = mesh, TraceRecorder(axes_of(mesh))

    def before_steps(self, run: Run) -> None:
        if self._watch is not None:
            self._watch(run)

    def before_step(self, run: Run) -> None:
        if run.step < 1:
            return
        for module in run.training.modules:
            for parameter in module.parameters:
                note = partial(self._note_gradient, is_reduced=_reduces_in_buckets(module))
                parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        self._records = True
        self._stack.enter_context(self.recorder.recording())
        for module in run.training.modules:
            self.recorder.label([*module.model.parameters(), *module.model.buffers()], "parameters")
            for optimizer in module.optimizers:
                states = [optimizer.state.get(each, {}) for each in module.parameters]
                self.recorder.label(states, "optimizer")

    def labelled(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def computed(output: Any, batch: Any) -> Any:
            self.recorder.label(output, "logits")
            is_chunked = any(isinstance(leaf, ChunkedLogits) for leaf in tensors_in(output))
            self.recorder.loss = "chunked logits" if is_chunked else "logits"
            try:
                return loss(output, batch)
            finally:
                self.recorder.loss = None

        return computed

    def see_batch(self, microbatch: Any, batch: Any) -> Any:
        if self.fake is not None:
            batch = map_tensors(batch, self._without_values)
        if self._records:
            self.recorder.label(batch, "data")
            self.recorder.mark("microbatch")
        return batch

    def _without_values(self, tensor: Tensor) -> Tensor:
        assert self.fake is not None, "asked before"
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)

    def _note_gradient(self, parameter: Tensor, is_reduced: bool) -> None:
        self.recorder.label(parameter.grad, "gradients")
        if is_reduced:
            self.recorder.mark(REDUCED)

    def after_backward(self, run: Run, model: torch.nn.Module) -> None:
        """Record the memory of the gradients: DDP's buckets, or the gradients of this step."""
        for module in run.training.modules:
            cause: Cause = "communication" if _reduces_in_buckets(module) else "gradients"
            self.recorder.label([each.grad for each in module.parameters], cause)
        if self._records:
            self.recorder.wait_for_all()
            self.recorder.mark("update")
            self.recorder.phase = "update"

    def after_step(self, run: Run) -> None:
        if not self._records:
            return
        self.recorder.mark("end")
        if run.training.source is not None and run.training.source.weights:
            self._tokens_per_sample = (
                sum(run.training.source.weights.values()) / run.training.source.samples
            )
        self.end_recording()
        raise _Traced

    def end_recording(self) -> None:
        self._stack.close()

    def trace(self) -> TracedStep:
        trace = self.recorder.trace(self.mesh.world.rank)
        return replace(trace, tokens_per_sample=self._tokens_per_sample)


def _reduces_in_buckets(module: TrainModule) -> bool:
    return module.choice.reducer is DdpReducer and module.mesh.data.size > 1


def axes_of(mesh: Mesh) -> Mapping[str, str]:
    """Map the names of process groups to mesh axes."""
    return {
        group_name(world.group or dist.group.WORLD): (
            "data" if len(names) > 1 and world is mesh.data else "_".join(names)
        )
        for names, world in reversed(list(mesh.groups.items()))
        if world.size > 1
    }
