"""The runs that a verification needs, and the trace that each run writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from lockstep.base.errors import PlanError
from lockstep.plan import Plan
from lockstep.scripts.request import ScriptRequest

PERTURBED_RUNS = 3
"""Number of runs with noise of one unit in the last place."""
FLOAT64_PERTURBED_RUNS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest(ScriptRequest):
    """The trace that a run of the script writes, and the changes to the run."""

    answered_by: ClassVar[str] = "lockstep.verify.probe"
    calls: str = "install"

    folder: Path = Path()
    steps: int | None = None
    """Number of steps after which the process ends; None if the run ends by itself."""
    noise_seed: int | None = None
    float64: bool = False
    microbatch: int | None = None
    eval_mode: bool = False
    """The model trains in eval mode: without dropout, and with BatchNorm's running statistics."""
    tokens: bool = False
    """Trace each token's output in the first step."""
    experts: bool = False
    """Trace each layer of experts in the first step."""
    uncompressed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(TraceRequest):
    """One run of the user's script, as a subprocess."""

    name: str
    plan: Plan
    processes: int
    steps: int

    def request(self, folder: Path) -> TraceRequest:
        named = {each.name: getattr(self, each.name) for each in fields(TraceRequest)}
        return TraceRequest(**{**named, "folder": folder})

    @property
    def text(self) -> str:
        plan = str(self.plan).removesuffix(",numerics=fast")
        if self.processes == 1:
            plan = plan.replace("replicate=1", "one process", 1)
        parts = (
            (True, plan.replace("one process,", "one process, ")),
            (self.noise_seed is not None, "with noise"),
            (self.float64, "in float64"),
            (self.eval_mode and self.microbatch is not None, f"microbatch={self.microbatch}"),
            (self.name.endswith("-compressed"), "with gradient_compression"),
        )
        return ", ".join(words for holds, words in parts if holds)


def parse_plans(texts: Sequence[str], *, bitwise: bool) -> list[tuple[Plan, int]]:
    """Return the plans and their world sizes. Raise `PlanError` for an invalid plan."""
    parsed: list[tuple[Plan, int]] = []
    if not texts:
        raise PlanError(
            "no plan to verify; --plans takes at least one; give for example --plans replicate=2"
        )
    for text in texts:
        plan = Plan.parse(
            f"{text},numerics=bitwise" if bitwise and "numerics" not in text else text
        )
        sizes: dict[str, Any] = plan.axis_sizes
        if "auto" in sizes.values():
            axis = next(axis for axis, size in sizes.items() if size == "auto")
            raise PlanError(
                f"{axis}=auto in plan {text!r}; verify starts as many processes as the axes"
                f" multiply to; give a number, such as {axis}=2"
            )
        if plan.microbatch_splits:
            raise PlanError(
                f"microbatch_splits={plan.microbatch_splits} in plan {text!r}; verify compares"
                " whole microbatches; leave microbatch_splits out, or give the recipe a smaller"
                " microbatch"
            )
        if bitwise and plan.numerics != "bitwise":
            raise PlanError(
                f"numerics=fast in plan {text!r} with --bitwise, which requires the same bits under"
                " every plan; leave out one of the two"
            )
        if plan in [other for other, _ in parsed]:
            raise PlanError(f"plan {str(plan)!r} is given twice in --plans; give it once")
        parsed.append((plan, math.prod(sizes.values())))
    return parsed


def reference_plan(plan: Plan) -> Plan:
    """Return the plan of the reference run on one process. For equal bits, the reference keeps the
    options of `plan` that change rounding."""
    same_bits = plan.numerics == "bitwise"
    return Plan(
        replicate=1,
        numerics=plan.numerics,
        compile=plan.compile and same_bits,
        logits=plan.logits if same_bits else "whole",
        slices=plan.slices,
    )


FAST_REFERENCE = reference_plan(Plan())


def reference_jobs(
    plans: Sequence[tuple[Plan, int]], steps: int, microbatch: int | None = None
) -> dict[Plan, Job]:
    references = sorted(
        {reference_plan(plan) for plan, _ in plans},
        key=lambda plan: (plan != FAST_REFERENCE, plan.compile, plan.logits, plan.slices),
    )
    jobs = {}
    for plan in references:
        compiled = "-compiled" if plan.compile else ""
        size = f"-microbatch-{microbatch}" if microbatch else ""
        chunked = "-chunked" if plan.logits == "chunked" else ""
        sliced = f"-slices-{plan.slices}" if plan.slices != 1 else ""
        name = f"reference-{plan.numerics}{compiled}{chunked}{sliced}{size}"
        jobs[plan] = Job(
            name=name,
            plan=plan,
            processes=1,
            steps=steps,
            microbatch=microbatch,
            tokens=any(each.divides("tokens") for each, _ in plans),
            experts=any(each.divides("experts") for each, _ in plans),
        )
    return jobs


def perturbed_jobs(steps: int, microbatch: int | None, count: int = PERTURBED_RUNS) -> list[Job]:
    return [
        Job(
            name=f"perturbed-{seed}",
            plan=FAST_REFERENCE,
            processes=1,
            steps=steps,
            noise_seed=seed,
            microbatch=microbatch,
        )
        for seed in range(count)
    ]


def plan_job(plan: Plan, processes: int, steps: int, microbatch: int | None) -> Job:
    return Job(
        name="plan-" + str(plan).replace(",", "-").replace("=", ""),
        plan=plan,
        processes=processes,
        steps=steps,
        microbatch=microbatch,
        tokens=plan.divides("tokens"),
        experts=plan.divides("experts"),
        uncompressed=True,
    )


def compressed(job: Job) -> Job:
    return replace(job, name=f"{job.name}-compressed", uncompressed=False)


def in_float64(job: Job) -> Job:
    return replace(job, name=f"{job.name}-float64", steps=1, float64=True)


def microbatch_size_jobs(global_batch: int, microbatch: int) -> list[Job]:
    """Return one-step runs in float64 and eval mode, with two microbatch sizes. Return an empty
    list if the batch is too small."""
    other = -(-microbatch // 2) if microbatch > 1 else 2
    if other == microbatch or other > global_batch:
        return []
    return [
        Job(
            name=f"microbatch-{size}",
            plan=FAST_REFERENCE,
            processes=1,
            steps=1,
            float64=True,
            eval_mode=True,
            microbatch=size,
        )
        for size in (microbatch, other)
    ]


def microbatch_for_all(global_batch: int, plans: Sequence[tuple[Plan, int]]) -> int:
    return max(1, -(-global_batch // max(processes for _, processes in plans)))
