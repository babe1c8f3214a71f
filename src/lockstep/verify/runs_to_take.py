"""Which runs a verification takes. Pure: from the plans asked for, and what the first run told of the recipe, to a list of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.base.errors import PlanError
from lockstep.plan import AXES, Plan

TWINS = 3
"""Noise twins: with the reference, six distances between two runs that differ by rounding alone."""
FLOAT64_TWINS = 2
"""The same of the first step in float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of the user's script, as a subprocess."""

    name: str
    """Of its folder, and in progress lines."""
    plan: Plan
    processes: int
    steps: int
    noise: int | None = None
    float64: bool = False
    microbatch: int | None = None
    eval_mode: bool = False
    exact: bool = False
    """Whether gradients are sent as they are, whatever the recipe's `gradient_compression`."""


def parse_plans(texts: Sequence[str], *, bitwise: bool) -> list[tuple[Plan, int]]:
    """The plans to verify, with the processes that each takes: the product of its axes.

    `bitwise` adds numerics=bitwise to each. Raises `PlanError` for one that cannot be read, has an axis without a size, halves
    microbatches, stands twice, or says numerics=fast where `bitwise` is asked for.
    """
    found: list[tuple[Plan, int]] = []
    if not texts:
        raise PlanError("no plan to verify; --plans takes at least one; give for example --plans replicate=2")
    for text in texts:
        plan = Plan.parse(text)
        sizes = {axis: getattr(plan, axis) for axis in AXES}
        if "auto" in sizes.values():
            axis = next(axis for axis, size in sizes.items() if size == "auto")
            raise PlanError(
                f"{axis}=auto in plan {text!r}; verify starts as many processes as the axes multiply to; give a number, such as {axis}=2"
            )
        if plan.microbatch_splits:
            raise PlanError(
                f"microbatch_splits={plan.microbatch_splits} in plan {text!r}; verify compares microbatch by microbatch, and halves are other ones; leave "
                "microbatch_splits out, or give the recipe a smaller microbatch"
            )
        if bitwise and "fast" in text:
            raise PlanError(
                f"numerics=fast in plan {text!r} with --bitwise; it asks for the same bits under every plan; leave one of the two out"
            )
        plan = replace(plan, numerics="bitwise") if bitwise else plan
        if plan in [other for other, _ in found]:
            raise PlanError(f"plan {str(plan)!r} stands twice in --plans; give it once")
        found.append((plan, math.prod(sizes.values())))
    return found


def alone(plan: Plan) -> Plan:
    """What a plan is compared with: one process; held to the bits, a compiled model with a compiled one, whose rounding it has."""
    return Plan(replicate=1, numerics=plan.numerics, compile=plan.compile and plan.numerics == "bitwise")


FAST = alone(Plan())


def reference_jobs(plans: Sequence[tuple[Plan, int]], steps: int, microbatch: int | None = None) -> dict[Plan, Job]:
    """Of each `alone` that plans are compared with, its run; the fast one first."""
    references = sorted({alone(plan) for plan, _ in plans}, key=lambda plan: (plan != FAST, plan.compile))
    return {
        reference: Job(
            name=f"reference-{reference.numerics}"
            + ("-compiled" if reference.compile else "")
            + (f"-microbatch-{microbatch}" if microbatch else ""),
            plan=reference,
            processes=1,
            steps=steps,
            microbatch=microbatch,
        )
        for reference in references
    }


def noise_jobs(steps: int, microbatch: int | None, count: int = TWINS) -> list[Job]:
    """The twins of the fast reference."""
    return [Job(name=f"twin-{seed}", plan=FAST, processes=1, steps=steps, noise=seed, microbatch=microbatch) for seed in range(count)]


def plan_job(plan: Plan, processes: int, steps: int, microbatch: int | None) -> Job:
    """The run that is held to the reference. Compression is left out: by how much it differs says `compressed`."""
    return Job(name=f"plan-{_file_name(plan)}", plan=plan, processes=processes, steps=steps, microbatch=microbatch, exact=True)


def compressed(job: Job) -> Job:
    """The same, with gradients sent as the recipe says."""
    return replace(job, name=f"{job.name}-compressed", exact=False)


def in_float64(job: Job) -> Job:
    """The same for one step in float64."""
    return replace(job, name=f"{job.name}-float64", steps=1, float64=True)


def microbatch_jobs(global_batch: int, microbatch: int) -> list[Job]:
    """A twin with microbatches of another size, and what to compare it with: one step in float64 and in eval mode. Empty: no other size."""
    other = -(-microbatch // 2) if microbatch > 1 else 2
    if other == microbatch or other > global_batch:
        return []
    return [
        Job(name=f"microbatch-{size}", plan=FAST, processes=1, steps=1, float64=True, eval_mode=True, microbatch=size)
        for size in (microbatch, other)
    ]


def common_microbatch(global_batch: int, plans: Sequence[tuple[Plan, int]]) -> int:
    """Where a recipe leaves the size to the plan: one for all plans, so that the plan with the most processes has one for each."""
    return max(1, -(-global_batch // max(processes for _, processes in plans)))


def _file_name(plan: Plan) -> str:
    return str(plan).replace(",", "-").replace("=", "")
