"""Searches the fastest plan of a recipe on given devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.base.errors import PlanError
from lockstep.base.words import counted
from lockstep.plan import Plan
from lockstep.planner.prediction import Outcome, Prediction, text
from lockstep.planner.trace import ON_HOST

LESS_MEMORY: tuple[dict[str, Any], ...] = (
    {"logits": "chunked"},
    {"checkpointing": "selective"},
    {"checkpointing": "full"},
    {"checkpointing": "full", "microbatch_splits": 1},
    {"checkpointing": "full", "microbatch_splits": 2},
    {"checkpointing": "full", "offload": True},
)
"""Changes to a plan that does not fit, in the order of the search. Each change saves more memory
and takes more time than the change before it."""
SMALLER: tuple[dict[str, Any], ...] = tuple({"microbatch_splits": splits} for splits in (1, 2, 4))
"""Smaller microbatches, which save memory without recomputing activations. The search tries smaller
microbatches before the changes in `LESS_MEMORY`."""
FILLED = 4
"""Microbatches per pipeline stage, if the recipe does not set the microbatch."""
SCHEDULED = 3
"""Number of the fastest pipeline plans that are also tried with other schedules."""
SCHEDULES = ("interleaved", "zero-bubble")
REFINED = 2
"""Number of the fastest plans to which each change in `REFINEMENTS` is applied."""
REFINEMENTS: tuple[dict[str, Any], ...] = ({"sharding": "gradients"}, {"compile": True})
"""Changes that may make a plan faster. The search tries each change on the fastest plans so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The devices and the recipe for which plans are searched."""

    devices: int
    devices_per_node: int
    samples: int
    microbatch: int | None
    """Samples in a microbatch; None if the plan chooses."""
    is_splittable: bool
    state_bytes: int
    capacity_bytes: int | None
    stages: int
    """Largest number of pipeline stages."""
    has_head: bool = False
    chunks: int | None = None
    """Largest number of chunks into which context parallelism can divide a sequence; None if
    samples are not sequences."""
    experts: int = 1
    """Greatest common divisor of the layers' numbers of experts; 1 without experts."""
    expert_bytes: int = 0

    @property
    def microbatches(self) -> int:
        return -(-self.samples // (self.microbatch or 1))

    @property
    def usable_devices(self) -> int:
        """Largest number of devices that data and context parallelism can use, in whole nodes."""
        sizes = range(self.devices, 0, -1)
        return next(size for size in sizes if self._is_whole(size) and self.contexts(size))

    def _is_whole(self, devices: int) -> bool:
        return devices < self.devices_per_node or devices % self.devices_per_node == 0

    def contexts(self, devices: int, each: int = 1) -> list[int]:
        """Return the possible sizes of the mesh axis `context`. Each rank computes at least two
        chunks of a sequence."""
        most = 1 if self.chunks is None else max(1, self.chunks // 2)
        return [
            size
            for size in _divisors(devices)
            if size <= most and devices // size * each <= self.microbatches
        ]

    def why_fewer(self) -> str:
        size, smaller = self.microbatch or 1, ""
        if self.devices <= self.samples:
            smaller = f", or microbatch={self.samples // self.devices}"
        if self.chunks is None:
            smaller += ", or, for a model of sequences, sequence=ls.Sequence()"
        return (
            f"no plan can use {self.devices} devices: a step has"
            f" {counted(self.microbatches, 'microbatch')} (global_batch={self.samples},"
            f" microbatch={size}), and each data rank needs one;"
            f" planned for {self.usable_devices}; to use all, give"
            f" global_batch={self.devices * size}{smaller}"
        )

    def most_splits(self, plan: Plan) -> int:
        size = self.microbatch or self.samples // plan.data_ranks
        return int(math.log2(max(1, size))) if self.is_splittable else 0


Evaluate = Callable[[Sequence[Plan]], Sequence[Outcome]]


def search(space: Space, evaluate: Evaluate) -> list[Outcome]:
    """Return the outcome of each plan, the fastest first. A plan that fits into memory is not
    changed to save memory."""
    outcomes: list[Outcome] = []
    plans = {plan: _held_bytes(plan, space) for plan in layouts(space)}
    smallest = min(plans.values(), default=0)
    for plan, held in list(plans.items()):
        if space.capacity_bytes is not None and held > max(space.capacity_bytes, smallest):
            del plans[plan]
            reason = (
                f"parameters and gradients alone need {held / 1e9:.0f} GB of the"
                f" {space.capacity_bytes / 1e9:.0f} GB"
            )
            outcomes.append(Outcome(plan=text(plan), reason=reason))
    outcomes += _with_less_memory(list(plans), space, evaluate)
    if not any(each.reason is None for each in outcomes):
        most = space.capacity_bytes or math.inf
        able = [plan for plan in shorter(space) if _held_bytes(plan, space) <= most]
        outcomes += _with_less_memory(able, space, evaluate)
    outcomes += evaluate(list(_scheduled(outcomes)))
    for change in REFINEMENTS:
        outcomes += evaluate(list(_refined(outcomes, change)))
    return sorted(outcomes, key=lambda outcome: (outcome.seconds, outcome.plan))


def layouts(space: Space) -> Iterator[Plan]:
    """Yield a plan for each way to divide the devices among mesh axes. Tensor parallelism stays
    inside a node."""
    for tensor in _divisors(space.devices):
        if tensor > space.devices_per_node or space.devices_per_node % tensor:
            continue
        for pipeline in _divisors(space.devices // tensor):
            is_too_deep = pipeline > max(1, space.stages)
            if is_too_deep and (tensor > 1 or pipeline != _divisors(space.devices)[1]):
                continue
            data = space.devices // tensor // pipeline
            # fewer microbatches than stages are refused, with a reason
            able = space.contexts(data, pipeline) or space.contexts(data)
            if not able:
                continue
            fills = 0
            if space.microbatch is None and pipeline > 1:
                fills = math.ceil(math.log2(FILLED * pipeline))
            for plan in _sharded(space, tensor=tensor, pipeline=pipeline, context=able[0]):
                yield replace(plan, microbatch_splits=min(fills, space.most_splits(plan)))


def shorter(space: Space) -> Iterator[Plan]:
    for context in space.contexts(space.devices)[1:]:
        yield from _sharded(space, context=context)


def _sharded(
    space: Space, *, tensor: int = 1, pipeline: int = 1, context: int = 1
) -> Iterator[Plan]:
    data = space.devices // tensor // pipeline // context
    near = max(1, space.devices_per_node // tensor // context)
    within = {near} if data % near == 0 and near < data else set[int]()
    sizes: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context}
    for shard in sorted({1, data} | within):
        yield Plan(replicate=data // shard, shard=shard, **sizes)
    if pipeline <= max(1, space.stages):
        yield from _with_experts(space, data, near, **sizes)


def _with_experts(space: Space, data: int, near: int, **sizes: Any) -> Iterator[Plan]:
    expert = max(each for each in _divisors(math.gcd(data, near)) if space.experts % each == 0)
    if expert > 1:
        for shard in sorted({1, data // expert}):
            yield Plan(replicate=data // expert // shard, shard=shard, expert=expert, **sizes)


def closest(outcomes: Sequence[Outcome]) -> Outcome | None:
    needed = [(each.prediction.needed_bytes, each) for each in outcomes if each.prediction]
    return min(needed, key=lambda pair: pair[0], default=(0, None))[1]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _held_bytes(plan: Plan, space: Space) -> int:
    dense = math.prod(
        plan.size(axis)
        for axis in plan.larger
        if not axis.same_state and (plan.shard != 1 or "experts" not in axis.divides)
    )
    experts = math.prod(
        plan.size(axis)
        for axis in plan.larger
        if not axis.same_state and "features" not in axis.divides
    )
    return (space.state_bytes - space.expert_bytes) // dense + space.expert_bytes // experts


def _with_less_memory(plans: Sequence[Plan], space: Space, evaluate: Evaluate) -> Iterator[Outcome]:
    """Evaluate plans. If a plan does not fit into memory, the search tries it again with changes
    that save memory."""
    remaining, one_fits = list(plans), False
    for change in ({}, *(SMALLER if space.microbatch is None else ()), *LESS_MEMORY):
        able = [plan for plan in remaining if _is_able(plan, change, space)]
        tried = [changed for plan in able for changed in _changed(plan, change)]
        outcomes = evaluate(tried)
        yield from outcomes
        too_large = [
            (plan, each.prediction)
            for plan, each in zip(tried, outcomes, strict=True)
            if each.prediction and each.reason
        ]
        waiting = [plan for plan in remaining if plan not in able]
        remaining = [*waiting, *(plan for plan, prediction in too_large if _may_fit(prediction))]
        one_fits |= any(outcome.reason is None for outcome in outcomes)
        if not remaining and not one_fits:
            remaining = [plan for plan, _ in too_large]
        if not remaining:
            return


def _is_able(plan: Plan, change: dict[str, Any], space: Space) -> bool:
    if "logits" in change:
        return space.has_head and bool(_changed(plan, change))
    splits = change.get("microbatch_splits")
    return splits is None or plan.microbatch_splits < splits <= space.most_splits(plan)


def _may_fit(prediction: Prediction) -> bool:
    """Return True if a device can hold the memory that activation checkpointing does not free."""
    held = sum(prediction.peak.by_cause.get(cause, 0) for cause in (*ON_HOST, "communication"))
    capacity = prediction.capacity_bytes
    return capacity is None or held + prediction.overhead_bytes < capacity


def _scheduled(outcomes: Sequence[Outcome]) -> Iterator[Plan]:
    for plan in _fastest([each for each in outcomes if "pipeline=" in each.plan], SCHEDULED):
        for schedule in SCHEDULES:
            yield from _changed(plan, {"schedule": schedule})


def _refined(outcomes: Sequence[Outcome], change: dict[str, Any]) -> Iterator[Plan]:
    able = [each for each in outcomes if "sharding" not in change or "shard=" in each.plan]
    for plan in _fastest(able, REFINED):
        yield from (changed for changed in _changed(plan, change) if changed != plan)


def _fastest(outcomes: Sequence[Outcome], count: int) -> list[Plan]:
    able = (each for each in outcomes if each.reason is None)
    ranked = sorted(able, key=lambda each: each.seconds)
    return [Plan.parse(each.plan) for each in ranked[:count]]


def _changed(plan: Plan, change: dict[str, Any]) -> list[Plan]:
    try:
        return [replace(plan, **change)]
    except PlanError:
        return []
