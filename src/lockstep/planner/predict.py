"""Predict a recipe's step under a plan: trace its ranks, simulate them on a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.assignment import MicrobatchAssignment
from lockstep.base.errors import PlanError, RecipeError
from lockstep.plan import Plan
from lockstep.planner.machines.machine import Machine
from lockstep.planner.prediction import Prediction, RankPeak, text
from lockstep.planner.simulate import Costs, StepTime, fused, repeated, simulate
from lockstep.planner.trace import (
    ON_HOST,
    Mark,
    Operation,
    TracedStep,
    offloaded,
    peak,
    with_more_microbatches,
)
from lockstep.planner.tracing.tracer import (
    ModelSize,
    TraceOptions,
    model_size,
    stage_split,
    trace_step,
)
from lockstep.recipe.data import Stream
from lockstep.recipe.recipe import Recipe
from lockstep.training.loop import steps_of

PCIE_BYTES_PER_SECOND = 25e9
"""Copies from pinned memory over PCIe 4.0 x16: https://en.wikipedia.org/wiki/PCI_Express gives
31.5e9."""
HOST_BYTES_PER_SECOND = 25e9
"""Each of eight devices' part of a host's 200e9."""
TRACED = 3
"""A first, a repeated and a last microbatch."""
ROUNDS = 3
"""Times that a pipeline's trace fills it."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The layout of a recipe's step under a plan."""

    microbatch: int
    count: int
    """Microbatches of the rank with the most."""
    traced: int
    """Microbatches of that rank in the trace."""
    load: float
    """Microbatches of all ranks, as a part of the most that they could have."""
    recipe: Recipe
    """The recipe of the trace."""
    plan: Plan


def predict(recipe: Recipe, plan: Plan, machine: Machine, *, is_fake: bool = True) -> Prediction:
    """Predict a step. `plan`: with sizes or `auto`. `is_fake=False`: compute with values on this
    CPU. Raises `PlanError` and `RecipeError` as a run would, and `ValueNeeded`."""
    if plan.microbatch_splits and not is_splittable(recipe, model_size(recipe)):
        raise RecipeError(
            f"microbatch_splits={plan.microbatch_splits}; half a microbatch of an ls.Stream has"
            " other samples, and under BatchNorm other statistics; leave microbatch_splits out, or"
            " give a smaller microbatch"
        )
    shape = _shape(recipe, plan.resolve(machine.cluster.count))
    traces = _traces(shape, machine, is_fake)
    whole = _whole(traces, shape)
    if shape.plan.pipeline != 1:
        traces = [with_more_microbatches(trace, shape.traced, shape.count) for trace in traces]
    if shape.plan.offload:
        traces = [offloaded(trace) for trace in traces]
    costs = machine.costs_of(shape.plan)
    step = _simulated(whole, costs, shape, machine)
    twice = {
        name: _simulated(whole, _twice(costs, name), shape, machine).seconds
        for name in ("arithmetic", "memory", "network")
    }
    distinct = list({trace.rank: trace for trace in traces}.values())
    return Prediction(
        plan=text(plan),
        microbatch=shape.microbatch,
        microbatches=shape.count,
        seconds=step.seconds,
        by_limit=step.by_limit,
        seconds_with_twice=twice,
        samples=recipe.global_batch or 0,
        tokens=(
            None
            if whole[0].tokens_per_sample is None
            else whole[0].tokens_per_sample * (recipe.global_batch or 0)
        ),
        steps=steps_of(recipe),
        memory=[_memory(trace) for trace in distinct],
        capacity_bytes=machine.capacity_bytes,
        overhead_bytes=machine.overhead_bytes,
        sent_bytes=whole[0].sent_bytes(),
    )


def seconds_on_costs(recipe: Recipe, plan: Plan, machine: Machine) -> Callable[[Costs], float]:
    """Trace a step. Returns a function that predicts its seconds with other costs."""
    shape = _shape(recipe, plan.resolve(machine.cluster.count))
    whole = _whole(_traces(shape, machine, is_fake=True), shape)
    return lambda costs: _simulated(whole, costs, shape, machine).seconds


def _whole(traces: Sequence[TracedStep], shape: _Shape) -> Sequence[TracedStep]:
    """Return the traces with all microbatches (not a pipeline's), and fused kernels if the plan
    compiles."""
    whole = traces if shape.plan.pipeline != 1 else [repeated(traces[0], shape.count)]
    return [fused(trace) for trace in whole] if shape.plan.compile else whole


def is_splittable(recipe: Recipe, size: ModelSize) -> bool:
    """True if `Plan.microbatch_splits` can split microbatches."""
    return not isinstance(recipe.data, Stream) and not size.has_batchnorm


def _shape(recipe: Recipe, plan: Plan) -> _Shape:
    if recipe.global_batch is None or recipe.batch_loss is not None:
        raise PlanError(
            "a recipe with batch_sampler or batch_loss; a step is planned from microbatches of one"
            " size; give global_batch"
        )
    data, ranks = plan.data_ranks, int(plan.pipeline or 1)
    if recipe.microbatch == "auto":
        raise PlanError(
            "microbatch='auto' is measured on the machine; a plan needs a number; give"
            " Recipe.microbatch one, or None"
        )
    given = recipe.microbatch or max(1, recipe.global_batch // data)
    microbatch = max(1, -(-min(given, recipe.global_batch) // 2**plan.microbatch_splits))
    total = -(-recipe.global_batch // microbatch)
    count = max(
        len(share)
        for share in MicrobatchAssignment(data, round_robin=plan.has_rounds).indices_by_rank(total)[
            :1
        ]
    )
    most = TRACED if ranks == 1 else ROUNDS * ranks
    traced = count if plan.schedule == "gpipe" and ranks > 1 else min(count, most)
    changes: dict[str, Any] = {"global_batch": recipe.global_batch, "microbatch": microbatch}
    if traced != count:
        changes["global_batch"] = microbatch * data * traced
        if isinstance(recipe.data, Stream):  # it has a shard for each microbatch
            changes["data"] = replace(recipe.data, shards=data * traced)
    changed = replace(
        recipe, **changes, precision="fp32" if recipe.precision == "auto" else recipe.precision
    )
    # FSDP computes what a rank lacks as dummies
    load = 1.0 if plan.has_rounds else total / (count * data)
    return _Shape(microbatch, count, traced, load, changed, replace(plan, microbatch_splits=0))


def _traces(shape: _Shape, machine: Machine, is_fake: bool) -> list[TracedStep]:
    """Return the trace of each stage's rank; without a pipeline one."""
    cluster = machine.cluster
    options = TraceOptions(
        world_size=cluster.count,
        local_size=cluster.devices_per_node,
        is_gpu=machine.is_gpu,
        is_fake=is_fake,
    )
    if shape.plan.pipeline == 1:
        return [trace_step(shape.recipe, shape.plan, options)]
    split = stage_split(shape.recipe, shape.plan, options)
    options = replace(options, boundaries=split.boundaries)
    ranks, stride = len(split.kinds), cluster.count // len(split.kinds)
    known: dict[object, TracedStep] = {}
    traces = []
    for place, kind in enumerate(split.kinds):
        key = kind, "first" if place == 0 else "last" if place == ranks - 1 else "middle"
        if key not in known:
            known[key] = trace_step(shape.recipe, shape.plan, replace(options, rank=place * stride))
        traces.append(known[key])
    return traces


def _simulated(
    traces: Sequence[TracedStep], costs: Costs, shape: _Shape, machine: Machine
) -> StepTime:
    """Simulate the step, slowed by communication beside it and by the slowest device."""
    step = simulate(traces, replace(costs, load=shape.load))
    if shape.plan.pipeline != 1:
        step = _extended(step, shape)
    slowed = machine.contention * step.overlapped_seconds
    if shape.plan.offload:
        copied = _offload_seconds(traces[0], shape)
        step = replace(
            step, seconds=step.seconds + copied, by_limit={**step.by_limit, "offload": copied}
        )
    seconds = (step.seconds + slowed) * (1 + machine.jitter * math.log2(machine.cluster.count))
    return replace(step, seconds=seconds, by_limit={**step.by_limit, "contention": slowed})


def _offload_seconds(trace: TracedStep, shape: _Shape) -> float:
    """Return the time of copies between device and CPU, and of the optimizer there. Parameters are
    copied for each forward and backward, gradients after each."""
    held = {
        cause: sum(
            each.bytes
            for each in trace.allocations
            if each.bytes > 0 and trace.causes[each.number] == cause
        )
        for cause in ON_HOST
    }
    copies = (2 * held["parameters"] + held["gradients"]) * shape.count / PCIE_BYTES_PER_SECOND
    return copies + 2 * sum(held.values()) / HOST_BYTES_PER_SECOND


def _extended(step: StepTime, shape: _Shape) -> StepTime:
    """Add a pipeline's untraced microbatches, at the slowest stage's time."""
    more = shape.count / shape.traced - 1
    added = {
        name: 0.0 if name == "bubble" else seconds * more for name, seconds in step.by_limit.items()
    }
    by_limit = {name: seconds + added[name] for name, seconds in step.by_limit.items()}
    overlapped = step.overlapped_seconds * (1 + more)
    return replace(
        step,
        seconds=step.seconds + sum(added.values()),
        by_limit=by_limit,
        overlapped_seconds=overlapped,
    )


def _twice(costs: Costs, what: str) -> Costs:
    """Return the costs where one thing is twice as fast."""

    def operation(each: Operation) -> float:
        faster = (what == "memory") == (each.kind == "memory")
        return costs.operation(each) / (2 if faster else 1)

    if what == "network":
        return replace(costs, collective=lambda each: costs.collective(each) / 2)
    return replace(costs, operation=operation)


def _memory(trace: TracedStep) -> RankPeak:
    most = peak(trace)
    return RankPeak(
        rank=trace.rank,
        bytes=most.bytes,
        by_cause=dict[str, int](most.by_cause.items()),
        moment=_moment(trace, most.at),
    )


def _moment(trace: TracedStep, at: int) -> str:
    """Say where in the step an item is."""
    marks = [item.name for item in trace.items[:at] if isinstance(item, Mark)]
    if "update" in marks:
        return "the optimizer's step"
    phases = [
        item.operation.phase
        for item in trace.items[:at]
        if not isinstance(item, Mark) and hasattr(item, "operation")
    ]
    where = {"forward": "the forward", "backward": "the backward", "recompute": "the backward"}.get(
        phases[-1] if phases else "", "the step"
    )
    return f"{where} of microbatch {marks.count('microbatch')}"
