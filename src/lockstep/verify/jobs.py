"""The runs that a verification needs, from the plans and from what the first run reports about the recipe. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.base.errors import PlanError
from lockstep.plan import AXES, Plan

PERTURBED_RUNS = 3
"""Perturbed runs of the reference. Together with it they give six distances between two runs that differ by rounding
alone."""
FLOAT64_PERTURBED_RUNS = 2
"""Perturbed runs of the first step in float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of the user's script, as a subprocess."""

    name: str
    """Name of its folder, and in progress lines."""
    plan: Plan
    processes: int
    steps: int
    noise_seed: int | None = None
    """Seed of a perturbed run's noise. None: not perturbed."""
    float64: bool = False
    microbatch: int | None = None
    """Samples in a microbatch, instead of the recipe's. None: the recipe's."""
    eval_mode: bool = False
    uncompressed: bool = False
    """True if gradients are sent uncompressed, whatever the recipe says."""


def parse_plans(texts: Sequence[str], *, bitwise: bool) -> list[tuple[Plan, int]]:
    """Return the plans to verify, each with its number of processes: the product of its axes.

    `bitwise` adds numerics=bitwise to each plan. Raises `PlanError` if a plan cannot be read, has an axis without a
    size, splits microbatches, is given twice, or says numerics=fast although `bitwise` is set.
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
                f"microbatch_splits={plan.microbatch_splits} in plan {text!r}; verify compares microbatch by microbatch, and parts of "
                "microbatches are other ones; leave microbatch_splits out, or give the recipe a smaller microbatch"
            )
        if bitwise and "fast" in text:
            raise PlanError(
                f"numerics=fast in plan {text!r} with --bitwise, which requires the same bits under every plan; leave out one of the two"
            )
        plan = replace(plan, numerics="bitwise") if bitwise else plan
        if plan in [other for other, _ in found]:
            raise PlanError(f"plan {str(plan)!r} is given twice in --plans; give it once")
        found.append((plan, math.prod(sizes.values())))
    return found


def reference_plan(plan: Plan) -> Plan:
    """Return the plan on one process that `plan` is compared with.

    Compilers round in their own way. So a compiled plan that must have the reference's bits is compared with a compiled
    reference.
    """
    return Plan(replicate=1, numerics=plan.numerics, compile=plan.compile and plan.numerics == "bitwise")


FAST_REFERENCE = reference_plan(Plan())


def reference_jobs(plans: Sequence[tuple[Plan, int]], steps: int, microbatch: int | None = None) -> dict[Plan, Job]:
    """Return the run of each reference plan that `plans` need; the one with numerics=fast first."""
    references = sorted({reference_plan(plan) for plan, _ in plans}, key=lambda plan: (plan != FAST_REFERENCE, plan.compile))
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


def perturbed_jobs(steps: int, microbatch: int | None, count: int = PERTURBED_RUNS) -> list[Job]:
    """Return the perturbed runs of the reference with numerics=fast."""
    return [
        Job(name=f"perturbed-{seed}", plan=FAST_REFERENCE, processes=1, steps=steps, noise_seed=seed, microbatch=microbatch)
        for seed in range(count)
    ]


def plan_job(plan: Plan, processes: int, steps: int, microbatch: int | None) -> Job:
    """Return the run that is compared with the reference. It does not compress gradients: `compressed` does."""
    name = "plan-" + str(plan).replace(",", "-").replace("=", "")
    return Job(name=name, plan=plan, processes=processes, steps=steps, microbatch=microbatch, uncompressed=True)


def compressed(job: Job) -> Job:
    """Return the same run with the gradient compression of the recipe."""
    return replace(job, name=f"{job.name}-compressed", uncompressed=False)


def in_float64(job: Job) -> Job:
    """Return the same run for one step in float64."""
    return replace(job, name=f"{job.name}-float64", steps=1, float64=True)


def microbatch_size_jobs(global_batch: int, microbatch: int) -> list[Job]:
    """Return a run with `microbatch` and one with another size, each one step in float64 and in eval mode.

    Empty if the global batch is too small for another size.
    """
    other = -(-microbatch // 2) if microbatch > 1 else 2
    if other == microbatch or other > global_batch:
        return []
    return [
        Job(name=f"microbatch-{size}", plan=FAST_REFERENCE, processes=1, steps=1, float64=True, eval_mode=True, microbatch=size)
        for size in (microbatch, other)
    ]


def microbatch_for_all(global_batch: int, plans: Sequence[tuple[Plan, int]]) -> int:
    """Return a microbatch size for all plans, for a recipe that leaves it to the plan.

    The plan with the most processes then has one microbatch for each.
    """
    return max(1, -(-global_batch // max(processes for _, processes in plans)))
