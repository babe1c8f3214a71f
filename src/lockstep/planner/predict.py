"""Predicts the time and memory of a recipe's step under a plan. Traces the step on some ranks, then
simulates it on a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.assignment import MicrobatchAssignment
from lockstep.base.errors import PlanError, RecipeError
from lockstep.plan import Plan
from lockstep.planner.machines.costs import Machine
from lockstep.planner.prediction import SKEW, Prediction, Skewed, text
from lockstep.planner.simulate import Costs, StepTime, extended_trace, fused, simulate
from lockstep.planner.trace import (
    HELD,
    ON_HOST,
    Mark,
    Operation,
    TracedStep,
    memory_peak,
    offloaded,
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
from lockstep.training.loop import total_steps_of

PCIE_BYTES_PER_SECOND = 25e9
"""Rate of copies from pinned memory over PCIe 4.0 x16. The peak rate of PCIe 4.0 x16 is 31.5e9
(https://en.wikipedia.org/wiki/PCI_Express)."""
HOST_BYTES_PER_SECOND = 25e9
"""Memory bandwidth of the host for each of its eight devices, 200e9 / 8."""
TRACED = 3
"""Number of microbatches in a trace. The simulation repeats the middle microbatch of the trace."""
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class _Shape:
    microbatch: int
    count: int
    """Number of microbatches of the rank that has the most microbatches."""
    traced: int
    load: float
    """Mean number of microbatches of a rank, relative to the rank with the most."""
    recipe: Recipe
    plan: Plan


def predict(recipe: Recipe, plan: Plan, machine: Machine, *, is_fake: bool = True) -> Prediction:
    """Trace on fake tensors, or on real CPU tensors if `is_fake` is False. Raise `ValueNeeded` if
    the script reads a fake tensor's value, and any error that a run would raise."""
    if plan.microbatch_splits and not is_splittable(recipe, model_size(recipe)):
        raise RecipeError(
            f"microbatch_splits={plan.microbatch_splits}; half a microbatch of an ls.Stream has"
            " other samples, under BatchNorm other statistics, and under Balance(over='microbatch')"
            " another balance loss; leave microbatch_splits out, or give a smaller microbatch"
        )
    shape = _shape(recipe, plan.resolve(machine.cluster.count))
    traces = _traces(shape, machine, is_fake)
    whole = _whole(traces, shape)
    if shape.plan.pipeline != 1 or Mark(HELD) in traces[0].items:
        traces = [with_more_microbatches(trace, shape.traced, shape.count) for trace in traces]
    if shape.plan.offload:
        traces = [offloaded(trace) for trace in traces]
    costs = machine.costs_of(shape.plan)
    step = _simulated(whole, costs, shape, machine)
    samples, tokens = recipe.global_batch or 0, whole[0].tokens_per_sample
    return Prediction(
        plan=text(plan),
        microbatch=shape.microbatch,
        microbatches=shape.count,
        seconds=step.seconds,
        by_limit=step.by_limit,
        seconds_with_twice={
            name: _simulated(whole, _twice(costs, name), shape, machine).seconds
            for name in ("arithmetic", "memory", "network")
        },
        samples=samples,
        tokens=None if tokens is None else tokens * samples,
        steps=total_steps_of(recipe),
        memory=[memory_peak(trace) for trace in {each.rank: each for each in traces}.values()],
        capacity_bytes=machine.capacity_bytes,
        overhead_bytes=machine.overhead_bytes,
        sent_bytes=whole[0].sent_bytes(),
        skewed=_skewed(shape, machine, is_fake) if shape.plan.divides("experts") else None,
    )


def _skewed(shape: _Shape, machine: Machine, is_fake: bool) -> Skewed:
    traces = _traces(shape, machine, is_fake, SKEW)
    step = _simulated(_whole(traces, shape), machine.costs_of(shape.plan), shape, machine)
    return Skewed(seconds=step.seconds, peak_bytes=memory_peak(traces[0]).bytes)


def seconds_on_costs(recipe: Recipe, plan: Plan, machine: Machine) -> Callable[[Costs], float]:
    """Trace a training step once, and return a function that predicts its time from costs."""
    shape = _shape(recipe, plan.resolve(machine.cluster.count))
    whole = _whole(_traces(shape, machine, is_fake=True), shape)
    return lambda costs: _simulated(whole, costs, shape, machine).seconds


def _whole(traces: Sequence[TracedStep], shape: _Shape) -> Sequence[TracedStep]:
    whole = (
        traces
        if shape.plan.pipeline != 1
        else [extended_trace(traces[0], shape.traced, shape.count)]
    )
    return [fused(trace) for trace in whole] if shape.plan.compile else whole


def is_splittable(recipe: Recipe, size: ModelSize) -> bool:
    """Return False if smaller microbatches would change the training, as with BatchNorm."""
    depends = recipe.balance is not None and recipe.balance.is_of_microbatches
    return not (isinstance(recipe.data, Stream) or size.has_batchnorm or depends)


def _shape(recipe: Recipe, plan: Plan) -> _Shape:
    if recipe.global_batch is None or recipe.batch_loss is not None:
        raise PlanError(
            "the recipe has a batch_sampler or batch_loss; a plan needs microbatches of one size;"
            " give global_batch"
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
    assignment = MicrobatchAssignment(data, round_robin=plan.has_rounds)
    count = len(assignment.indices_by_rank(total)[0])
    most = TRACED if ranks == 1 else ROUNDS * ranks
    traced = count if plan.schedule == "gpipe" and ranks > 1 else min(count, most)
    changes: dict[str, Any] = {"microbatch": microbatch}
    if traced != count:
        changes["global_batch"] = microbatch * data * traced
        if isinstance(recipe.data, Stream):  # a stream has one shard for each microbatch of a step
            changes["data"] = replace(recipe.data, shards=data * traced)
    if recipe.precision == "auto":
        changes["precision"] = "fp32"
    # under FSDP, a rank with fewer microbatches computes dummy ones: all ranks have the same load
    load = 1.0 if plan.has_rounds else total / (count * data)
    changed, unsplit = replace(recipe, **changes), replace(plan, microbatch_splits=0)
    return _Shape(microbatch, count, traced, load, changed, unsplit)


def _traces(shape: _Shape, machine: Machine, is_fake: bool, skew: float = 1.0) -> list[TracedStep]:
    cluster = machine.cluster
    options = TraceOptions(
        world_size=cluster.count,
        local_size=cluster.devices_per_node,
        is_gpu=machine.is_gpu,
        is_fake=is_fake,
        skew=skew,
    )
    if shape.plan.pipeline == 1:
        return [trace_step(shape.recipe, shape.plan, options)]
    split = stage_split(shape.recipe, shape.plan, options)
    options = replace(options, boundaries=split.boundaries)
    ranks, stride = len(split.kinds), cluster.count // len(split.kinds)
    known: dict[object, TracedStep] = {}
    traces = []
    for at, kind in enumerate(split.kinds):
        key = kind, at == 0, at == ranks - 1
        if key not in known:
            known[key] = trace_step(shape.recipe, shape.plan, replace(options, rank=at * stride))
        traces.append(known[key])
    return traces


def _simulated(
    traces: Sequence[TracedStep], costs: Costs, shape: _Shape, machine: Machine
) -> StepTime:
    step = simulate(traces, replace(costs, load=shape.load))
    if shape.plan.pipeline != 1:
        step = _extended(step, shape)
    slowed = machine.contention * step.overlapped_seconds
    copied = {"offload": _offload_seconds(traces[0], shape)} if shape.plan.offload else {}
    seconds = step.seconds + sum(copied.values()) + slowed
    return replace(
        step,
        seconds=seconds * (1 + machine.jitter * math.log2(machine.cluster.count)),
        by_limit={**step.by_limit, **copied, "contention": slowed},
    )


def _offload_seconds(trace: TracedStep, shape: _Shape) -> float:
    held = dict.fromkeys(ON_HOST, 0)
    for each in trace.allocations:
        if each.bytes > 0 and (cause := trace.causes[each.number]) in held:
            held[cause] += each.bytes
    copies = (2 * held["parameters"] + held["gradients"]) * shape.count / PCIE_BYTES_PER_SECOND
    return copies + 2 * sum(held.values()) / HOST_BYTES_PER_SECOND


def _extended(step: StepTime, shape: _Shape) -> StepTime:
    more = shape.count / shape.traced - 1
    parts = step.by_limit.items()
    added = {name: 0.0 if name == "bubble" else seconds * more for name, seconds in parts}
    return replace(
        step,
        seconds=step.seconds + sum(added.values()),
        by_limit={name: seconds + added[name] for name, seconds in parts},
        overlapped_seconds=step.overlapped_seconds * (1 + more),
    )


def _twice(costs: Costs, what: str) -> Costs:
    def operation(each: Operation) -> float:
        faster = (what == "memory") == (each.kind == "memory")
        return costs.operation(each) / (2 if faster else 1)

    if what == "network":
        return replace(costs, collective=lambda each: costs.collective(each) / 2)
    return replace(costs, operation=operation)
