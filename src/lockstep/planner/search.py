"""The search among the legal plans for a number of devices. Pure: `evaluate` predicts plans, several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.base.errors import PlanError
from lockstep.plan import Plan
from lockstep.planner.prediction import Prediction
from lockstep.planner.trace import ON_HOST

LESS_MEMORY: tuple[dict[str, Any], ...] = (
    {"checkpointing": "selective"},
    {"checkpointing": "full"},
    {"checkpointing": "full", "microbatch_splits": 1},
    {"checkpointing": "full", "microbatch_splits": 2},
    {"checkpointing": "full", "offload": True},
)
"""Changes of a plan that does not fit, in the order in which they are tried. Each takes less memory and more time."""
SCHEDULED = 3
"""Pipelines, the fastest first, that are tried with other schedules."""
SCHEDULES = ("interleaved", "zero-bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A plan, and its prediction or the reason why there is none."""

    plan: str
    prediction: Prediction | None = None
    reason: str | None = None
    """Why the plan cannot be run, or does not fit; None if it can."""

    @property
    def seconds(self) -> float:
        """Those of a step; infinite if the plan cannot be run."""
        return float("inf") if self.prediction is None or self.reason is not None else self.prediction.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The devices and the recipe that plans are searched for."""

    devices: int
    devices_per_node: int
    microbatches: int
    """Microbatches in a global batch: more data ranks would have nothing to compute."""
    state_bytes: int
    """Bytes of the model's parameters and gradients."""
    capacity_bytes: int | None
    microbatch: int
    """Samples of a microbatch."""
    stages: int
    """Most stages of a pipeline. 0 or 1: none can be made, and one pipeline alone is tried, which says why."""


Evaluate = Callable[[Sequence[Plan]], Sequence[Outcome]]


def search(space: Space, evaluate: Evaluate) -> list[Outcome]:
    """Return the outcome of each plan that was considered, the fastest that fits first. A plan that fits is not tried
    with less memory; one whose parameters alone do not fit is not tried at all, unless no other has fewer."""
    outcomes: list[Outcome] = []
    plans = list(layouts(space))
    smallest = min(_held_bytes(plan, space) for plan in plans)
    for plan in list(plans):
        if (reason := _too_large(plan, space)) is not None and _held_bytes(plan, space) > smallest:
            plans.remove(plan)
            outcomes.append(Outcome(plan=text(plan), reason=reason))
    outcomes += _with_less_memory(plans, space, evaluate)
    outcomes += evaluate(list(_scheduled(outcomes)))
    return sorted(outcomes, key=lambda outcome: (outcome.seconds, outcome.plan))


def layouts(space: Space) -> Iterator[Plan]:
    """Yield a plan for each way to lay out all devices on the axes. Tensor parallelism stays inside a node; parameters
    are sharded over all data ranks, over those of a node, or not at all."""
    for tensor in _divisors(space.devices):
        if tensor > space.devices_per_node or space.devices_per_node % tensor:
            continue
        for pipeline in _divisors(space.devices // tensor):
            if pipeline > max(1, space.stages) and (tensor > 1 or pipeline != _divisors(space.devices)[1]):
                continue
            data = space.devices // tensor // pipeline
            if data > space.microbatches:
                continue
            near = max(1, space.devices_per_node // tensor)
            for shard in sorted({1, data} | ({near} if data % near == 0 and near < data else set())):
                yield Plan(replicate=data // shard, shard=shard, tensor=tensor, pipeline=pipeline)


def text(plan: Plan) -> str:
    """Return a plan as a user writes it, without axes of one process."""
    axes = [f"{axis}={getattr(plan, axis)}" for axis in ("replicate", "shard", "tensor", "pipeline") if getattr(plan, axis) != 1]
    rest = [part for part in str(plan).split(",") if part.split("=")[0] not in ("replicate", "shard", "tensor", "pipeline")]
    return ",".join([*(axes or ["replicate=1"]), *(part for part in rest if part != "numerics=fast")])


def closest(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the plan that needs the least memory, if none fits."""
    predicted = [each for each in outcomes if each.prediction is not None]
    return min(predicted, key=lambda each: each.prediction.needed_bytes if each.prediction else 0, default=None)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _held_bytes(plan: Plan, space: Space) -> int:
    return space.state_bytes // (int(plan.shard or 1) * int(plan.tensor or 1) * int(plan.pipeline or 1))


def _too_large(plan: Plan, space: Space) -> str | None:
    held = _held_bytes(plan, space)
    if space.capacity_bytes is None or held <= space.capacity_bytes:
        return None
    return f"parameters and gradients alone need {held / 1e9:.0f} GB of the {space.capacity_bytes / 1e9:.0f} GB"


def _with_less_memory(plans: Sequence[Plan], space: Space, evaluate: Evaluate) -> Iterator[Outcome]:
    """Evaluate the plans, and those that do not fit again with each change that takes less memory, until they do. One
    whose parameters, gradients and optimizer state alone do not fit is tried again only if no other plan fits."""
    remaining, one_fits = list(plans), False
    for change in ({}, *LESS_MEMORY):
        if 2 ** change.get("microbatch_splits", 0) > space.microbatch:
            continue
        tried = [changed for plan in remaining for changed in _changed(plan, change)]
        outcomes = evaluate(tried)
        yield from outcomes
        too_large = [(plan, each.prediction) for plan, each in zip(tried, outcomes, strict=True) if each.prediction and each.reason]
        remaining = [plan for plan, prediction in too_large if _may_fit(prediction)]
        one_fits |= any(outcome.reason is None for outcome in outcomes)
        if not remaining and not one_fits:
            remaining = [plan for plan, _ in too_large]
        if not remaining:
            return


def _may_fit(prediction: Prediction) -> bool:
    """True if what no checkpointing can free leaves room."""
    held = sum(prediction.peak.by_cause.get(cause, 0) for cause in ON_HOST)
    return prediction.capacity_bytes is None or held + prediction.overhead_bytes < prediction.capacity_bytes


def _scheduled(outcomes: Sequence[Outcome]) -> Iterator[Plan]:
    ranked = sorted((each for each in outcomes if "pipeline=" in each.plan and each.reason is None), key=lambda each: each.seconds)
    for outcome in ranked[:SCHEDULED]:
        for schedule in SCHEDULES:
            yield from _changed(Plan.parse(outcome.plan), {"schedule": schedule})


def _changed(plan: Plan, change: dict[str, Any]) -> list[Plan]:
    """The plan with a change; none if that is no legal plan."""
    try:
        return [replace(plan, **change)]
    except PlanError:
        return []
