"""A whole verification: which runs, in which order, and what they come to together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.base.errors import LaunchError
from lockstep.plan import Plan
from lockstep.verify import runs_to_take as twins
from lockstep.verify.cause import Evidence, likely_cause
from lockstep.verify.compare import LIMIT, SAID, Comparison, Finding, compare, compare_compressed
from lockstep.verify.records import EPS, Trace
from lockstep.verify.run import Ended, Runner
from lockstep.verify.runs_to_take import FAST
from lockstep.verify.yardstick import Yardstick

COMPUTE_EPS = {"fp32": EPS["float32"], "bf16": EPS["bfloat16"], "fp16": EPS["float16"]}
FLOAT64_MARGIN = 4.0
"""Noise shrinks with the type's precision but not exactly so."""

COLUMNS = ("plan", "processes", "verdict", "may differ by", "differs by", "where")
ROUNDING = "rounding: how far apart runs on one process come that differ by noise of one unit in the last place"

CUT_FLOOR = 1e-9
CUT_ULPS = 100.0
"""Cut otherwise, a sum has other rounding: this much of a gradient in float64, so many units in the last place of a shorter type in it."""

_SCALAR = (
    "It is probably a mean over tokens (or pixels, or whatever is not ignored), returned as a plain scalar, so that each microbatch counts "
    "the same: return ls.Sum(total) and give Recipe.weight = batch -> what it is divided by."
)
_WEIGHTED = (
    "It has weights, so that its total is to be the sum of what the samples give alone: it may be a mean all the same, or look at the size "
    "of the microbatch, or the model keeps something from one microbatch to the next (a counter, a cache, a hidden state)."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The first thing that is wrong under a plan."""

    finding: Finding
    float64: bool
    """Seen in the float64 run."""
    cause: str | None

    def text(self) -> str:
        """One sentence about what, where and by how much."""
        finding = self.finding
        when = f"step {finding.step}" if finding.step >= 0 else "before the first step"
        what = SAID[finding.check] + (f" {finding.name!r}" if finding.name else "")
        where = f" on rank {finding.rank}" if finding.rank else ""
        who = f", microbatch {', '.join(map(str, finding.microbatches))}" if finding.microbatches else ""
        sizes = [f"{finding.relative:.2g} of its size"] if math.isfinite(finding.relative) else []
        sizes += [f"{finding.ratio:.3g} × rounding"] if math.isfinite(finding.ratio) else []
        off = f": off by {', '.join(sizes)}" if sizes else ""
        return f"{when}: {what}{where}{who}{off}" + (" (in float64)" if self.float64 else "")

    def why(self) -> str:
        return f"likely cause: {self.cause or 'no known pattern; compare the gradients of the first step (--keep DIR)'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compressed:
    """By how much a run differs from itself with gradients sent as they are: each relative, tensors pooled."""

    gradient_compression: str
    steps: int
    gradient: float
    """In the first step."""
    parameters: float
    """After the last, as the loss."""
    loss: float

    def text(self) -> str:
        return (
            f"gradient_compression={self.gradient_compression}: after {self.steps} steps the loss differs by {self.loss:.2g} of its size from gradient_compression=none, the "
            f"parameters by {self.parameters:.2g}; the first gradient by {self.gradient:.2g}"
        )


@dataclass(kw_only=True, slots=True)
class Verdict:
    """What is said of one plan."""

    plan: str
    processes: int
    bitwise: bool
    ran: bool = True
    """False: the run under it failed."""
    status: int = 0
    error: str = ""
    seconds: float = 0.0
    """That the run under it took."""
    failure: Failure | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    """In the run's own type, one for each pair."""
    float64: list[Comparison] = field(default_factory=list)
    """The first step in float64, one for each pair. Empty: not done."""
    compressed: list[Compressed] = field(default_factory=list)
    """What the recipe's `gradient_compression` changes, one for each pair. Empty where that is "none"."""
    remarks: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.ran and self.failure is None

    @property
    def worst(self) -> Finding | None:
        found = [each.worst for each in self.comparisons if each.worst is not None]
        return max(found, key=lambda finding: finding.ratio, default=None)

    def row(self, limit: float) -> tuple[str, ...]:
        """What tables say of it, column by column as in `COLUMNS`."""
        said = "passes" if self.passed else "fails" if self.ran else "did not run"
        allowed = "same bits" if self.bitwise else f"{limit:g} × rounding"
        finding = self.worst if self.failure is None else self.failure.finding
        if finding is None:
            return self.plan, str(self.processes), said, allowed, "same bits" if self.ran else "", ""
        size = f"{finding.ratio:.3g} × rounding" if math.isfinite(finding.ratio) else ""
        where = f"{SAID[finding.check]} {finding.name}".rstrip() + (f", step {finding.step}" if finding.step >= 0 else "")
        where += " (float64)" if self.failure is not None and self.failure.float64 else ""
        return self.plan, str(self.processes), said, allowed, size, where


@dataclass(kw_only=True, slots=True)
class Report:
    """What `lockstep verify` found."""

    script: str
    steps: int
    verdicts: list[Verdict] = field(default_factory=list)
    recipe: Failure | None = None
    """The loss depends on how the batch is cut: a fault of the recipe under any plan."""
    recipe_checked: bool = False
    remarks: list[str] = field(default_factory=list)
    bands: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """`gradients`, `parameters`, `loss`: at each step, the twins' least and largest distance from one another."""
    limit: float = LIMIT

    @property
    def passed(self) -> bool:
        return self.recipe is None and all(verdict.passed for verdict in self.verdicts)

    def summary(self) -> str:
        """What it comes to, in one line."""
        failed = sum(not verdict.passed for verdict in self.verdicts)
        if failed:
            return f"{failed} of {len(self.verdicts)} plans not shown to train the same model as one process"
        said = "every plan trains the same model as one process"
        return said if self.recipe is None else f"{said}, but the loss depends on how a batch is cut into microbatches"

    def as_json(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "passed": self.passed,
            "steps": self.steps,
            "limit": self.limit,
            "recipe": {"checked": self.recipe_checked, "failure": _failure(self.recipe)},
            "remarks": self.remarks,
            "plans": [_verdict(verdict) for verdict in self.verdicts],
            "twins": {kind: [list(pair) for pair in band] for kind, band in self.bands.items()},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a verification is asked for."""

    plans: Sequence[tuple[Plan, int]]
    steps: int
    float64: bool
    other_microbatch: bool
    """Whether the loss must not depend on how the batch is cut."""


class Verification:
    """Runs everything that is wanted, and compares. Raises `LaunchError` where the script fails, or never trains, on one process."""

    def __init__(self, script: str, wanted: Wanted, runner: Runner) -> None:
        self._wanted = wanted
        self._runner = runner
        self._report = Report(script=script, steps=wanted.steps)
        self._script = script
        self._microbatch: int | None = None
        self._fast = any(plan.numerics == "fast" for plan, _ in wanted.plans)

    def run(self) -> Report:
        references = self._references()
        self._first = next(iter(references.values()))
        started = self._start(self._first[0].facts)
        yardsticks = {plan: [Yardstick(trace, []) for trace in traces] for plan, traces in references.items()}
        if self._fast:
            noisy = [_traces(future.result(), "a noise twin", self._script) for future in started.twins]
            yardsticks[FAST] = [Yardstick(trace, [twin[pair] for twin in noisy]) for pair, trace in enumerate(references[FAST])]
            self._bands(yardsticks[FAST][0])
        in_float64 = self._float64_yardsticks(started, yardsticks.get(FAST, []))
        runs = zip(self._wanted.plans, started.plans, started.plans64, started.compressed, strict=True)
        for (plan, processes), run, run64, with_comm in runs:
            verdict = Verdict(plan=str(plan), processes=processes, bitwise=plan.numerics == "bitwise")
            self._judge(verdict, run.result(), yardsticks[twins.alone(plan)])
            if verdict.ran and run64 is not None and in_float64:
                self._judge_float64(verdict, run64.result(), in_float64)
            if verdict.ran and with_comm is not None:
                self._judge_compressed(verdict, run.result().traces, with_comm.result())
            self._report.verdicts.append(verdict)
        self._check_recipe(started)
        return self._report

    def _references(self) -> dict[Plan, list[Trace]]:
        ended = self._run_references()
        facts = next(iter(ended.values()))[0].facts
        if facts["microbatch"] is None:
            self._microbatch = twins.common_microbatch(facts["global_batch"], self._wanted.plans)
            self._report.remarks.append(
                f"the recipe fixes no microbatch, so that dropout and BatchNorm depend on the plan, or on what is measured; verified with "
                f"microbatch={self._microbatch} under every plan"
            )
            ended = self._run_references()
        self._report.steps = min(self._wanted.steps, next(iter(ended.values()))[0].steps)
        return ended

    def _run_references(self) -> dict[Plan, list[Trace]]:
        jobs = twins.reference_jobs(self._wanted.plans, self._wanted.steps, self._microbatch)
        ended = self._runner.run(list(jobs.values()))
        return {plan: _traces(each, "one process", self._script) for plan, each in zip(jobs, ended, strict=True)}

    def _start(self, facts: Mapping[str, Any]) -> _Started:
        """Everything else, at once: the runner takes them as there is room."""
        wanted, start = self._wanted, self._runner.start
        jobs = [twins.plan_job(plan, processes, wanted.steps, self._microbatch) for plan, processes in wanted.plans]
        started = _Started(plans=[start(job) for job in jobs])
        started.compressed = [None if facts["gradient_compression"] == "none" else start(twins.compressed(job)) for job in jobs]
        if self._fast:
            started.twins = [start(job) for job in twins.noise_jobs(wanted.steps, self._microbatch)]
        exact = wanted.float64 and self._fast
        if exact:
            reference = twins.reference_jobs(wanted.plans, wanted.steps, self._microbatch)[FAST]
            started.reference64 = start(twins.in_float64(reference))
            noisy = twins.noise_jobs(1, self._microbatch, twins.FLOAT64_TWINS)
            started.twins64 = [start(twins.in_float64(job)) for job in noisy]
        started.plans64 = [start(twins.in_float64(job)) if exact and job.plan.numerics == "fast" else None for job in jobs]
        if wanted.other_microbatch:
            size = self._microbatch or facts["microbatch"]
            started.microbatches = [start(job) for job in twins.microbatch_jobs(facts["global_batch"], size)]
        return started

    def _float64_yardsticks(self, started: _Started, fast: Sequence[Yardstick]) -> list[Yardstick]:
        if started.reference64 is None:
            return []
        ended = started.reference64.result()
        noisy = [future.result() for future in started.twins64]
        if not (ended.traces and all(twin.traces for twin in noisy)):
            self._report.remarks.append(f"the first step was not repeated in float64: the script fails in it ({_last_line(ended.error)})")
            return []
        facts = ended.traces[0].facts
        if facts.get("islands"):
            self._report.remarks.append(
                f"the float64 run is only as exact as {', '.join(facts['islands'])}, which give a shorter type inside the model"
            )
        compute = COMPUTE_EPS[fast[0].reference.facts["precision"]]
        scale = FLOAT64_MARGIN * max(facts.get("eps", EPS["float64"]), EPS["float64"]) / compute
        return [
            yardstick.in_float64(trace, [twin.traces[pair] for twin in noisy], scale=scale, margin=FLOAT64_MARGIN)
            for pair, (yardstick, trace) in enumerate(zip(fast, ended.traces, strict=True))
        ]

    def _judge(self, verdict: Verdict, ended: Ended, yardsticks: Sequence[Yardstick]) -> None:
        verdict.seconds = ended.seconds
        if not _ran(verdict, ended):
            return
        for yardstick, trace in zip(yardsticks, ended.traces, strict=True):
            comparison = compare(yardstick.reference, trace, yardstick, bitwise=verdict.bitwise)
            verdict.comparisons.append(comparison)
            verdict.remarks += comparison.remarks
            _first_failure(verdict, comparison, yardstick.reference, trace, float64=False)

    def _judge_float64(self, verdict: Verdict, ended: Ended, yardsticks: Sequence[Yardstick]) -> None:
        if not ended.traces:
            verdict.remarks.append(f"not repeated in float64 under this plan: {_last_line(ended.error)}")
            return
        for yardstick, trace in zip(yardsticks, ended.traces, strict=True):
            comparison = compare(yardstick.reference, trace, yardstick, bitwise=False)
            verdict.float64.append(comparison)
            _first_failure(verdict, comparison, yardstick.reference, trace, float64=True)

    def _judge_compressed(self, verdict: Verdict, exact: Sequence[Trace], ended: Ended) -> None:
        """How far compression leads away is said, and fails nothing; ranks that differ do."""
        if not _ran(verdict, ended):
            return
        for without, trace in zip(exact, ended.traces, strict=True):
            comparison = compare_compressed(without, trace)
            away = comparison.curves
            verdict.compressed.append(
                Compressed(
                    gradient_compression=trace.facts["gradient_compression"],
                    steps=comparison.steps,
                    gradient=away["gradients"][0],
                    parameters=away["parameters"][-1],
                    loss=away["loss"][-1],
                )
            )
            _first_failure(verdict, comparison, without, trace, float64=False)

    def _bands(self, yardstick: Yardstick) -> None:
        steps = self._report.steps
        self._report.bands = {kind: [yardstick.band(step, kind) for step in range(steps)] for kind in ("gradients", "parameters")}
        self._report.bands["loss"] = [yardstick.loss_band(step) for step in range(steps)]

    def _check_recipe(self, started: _Started) -> None:
        """The twin with another microbatch size: the same samples cut otherwise must give the same gradient."""
        ended = [future.result() for future in started.microbatches]
        if len(ended) < 2:
            return
        if not all(each.traces for each in ended):
            failed = next(each for each in ended if not each.traces)
            self._report.remarks.append(f"the loss was not tried with another microbatch size: {_last_line(failed.error)}")
            return
        ours, theirs = (each.traces[0] for each in ended)
        if any(microbatch.drew for microbatch in ours.microbatches):
            self._report.remarks.append(
                "the loss was not tried with another microbatch size: the forward draws random numbers even in eval mode"
            )
            return
        self._report.recipe_checked = True
        self._report.recipe = other_cut(ours, theirs, ended[1].job.microbatch or 0)


@dataclass(kw_only=True, slots=True)
class _Started:
    plans: list[Future[Ended]]
    compressed: list[Future[Ended] | None] = field(default_factory=list)
    plans64: list[Future[Ended] | None] = field(default_factory=list)
    twins: list[Future[Ended]] = field(default_factory=list)
    reference64: Future[Ended] | None = None
    twins64: list[Future[Ended]] = field(default_factory=list)
    microbatches: list[Future[Ended]] = field(default_factory=list)


def other_cut(ours: Trace, theirs: Trace, size: int) -> Failure | None:
    """The fault of a loss that is not a sum over samples, where two cuts of one batch give two gradients. Pure."""
    yardstick = Yardstick(ours, [], floor=max(CUT_FLOOR, CUT_ULPS * ours.facts.get("eps", 0.0)))
    comparison = compare(replace(ours, microbatches=[]), replace(theirs, microbatches=[]), yardstick, bitwise=False)
    wrong = [finding for finding in comparison.findings if finding.check in ("gradients", "missing", "loss")]
    if not wrong:
        return None
    return Failure(
        finding=wrong[0],
        float64=True,
        cause=(
            f"the loss is not a sum over samples: cut into microbatches of {size} instead of {ours.facts['microbatch']}, the same batch "
            f"has another gradient. {_WEIGHTED if ours.first.steps[0].weight is not None else _SCALAR} Where the loss is meant to look at "
            "a microbatch as a whole (contrastive losses), say so: --whole-microbatch-loss"
        ),
    )


def _ran(verdict: Verdict, ended: Ended) -> bool:
    """Whether the run left traces; if not, the verdict says why."""
    if not ended.traces:
        verdict.ran, verdict.status = False, ended.status or 1
        verdict.error = ("the run did not end in time; " if ended.timed_out else "") + (ended.error or "it ended without a step")
    return verdict.ran


def _first_failure(verdict: Verdict, comparison: Comparison, reference: Trace, trace: Trace, *, float64: bool) -> None:
    """The earlier one counts: float64 may see in its one step what the run's own type hides until a later one."""
    if comparison.findings and (verdict.failure is None or comparison.findings[0].step < verdict.failure.finding.step):
        cause = likely_cause(Evidence(reference, trace, comparison.findings))
        verdict.failure = Failure(finding=comparison.findings[0], float64=float64, cause=cause)


def _traces(ended: Ended, under: str, script: str) -> list[Trace]:
    if ended.traces:
        return ended.traces
    if ended.timed_out:
        raise LaunchError(
            f"{script!r} under {under} did not come to its step {ended.job.steps} in {ended.seconds:.0f} s; verify waits that long for "
            "each run; give fewer --steps, or a longer --timeout"
        )
    if ended.status:
        raise LaunchError(
            f"{script!r} fails under {under} (exit status {ended.status}), so that there is nothing to compare plans with; make "
            f"`lockstep run --nproc 1 {script}` work first; it said:\n{ended.error}"
        )
    raise LaunchError(
        f"{script!r} ended without a step of lockstep's training; verify compares the steps of ls.train or ls.Session; call one of them "
        "in the script (is the call behind a condition that does not hold here?)"
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("The others:")]
    return lines[-1].strip()[:200] if lines else "it ended without a step"


def _verdict(verdict: Verdict) -> dict[str, Any]:
    worst = verdict.worst
    return {
        "plan": verdict.plan,
        "processes": verdict.processes,
        "held_to": "bits" if verdict.bitwise else "noise",
        "passed": verdict.passed,
        "ran": verdict.ran,
        "status": verdict.status,
        "error": verdict.error or None,
        "seconds": verdict.seconds,
        "failure": _failure(verdict.failure),
        "worst": None if worst is None else _finding(worst),
        "float64_worst": max((c.worst.ratio for c in verdict.float64 if c.worst is not None), default=None),
        "float64": bool(verdict.float64),
        "compressed": [asdict(each) for each in verdict.compressed],
        "remarks": verdict.remarks,
        "curves": verdict.comparisons[0].curves if verdict.comparisons else {},
    }


def _failure(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {**_finding(failure.finding), "float64": failure.float64, "cause": failure.cause, "text": failure.text()}


def _finding(finding: Finding) -> dict[str, Any]:
    infinite = float("inf")
    return {
        "step": finding.step,
        "what": finding.check,
        "name": finding.name or None,
        "rank": finding.rank,
        "ratio": finding.ratio if finding.ratio < infinite else None,
        "relative": finding.relative if finding.relative < infinite else None,
        "microbatches": list(finding.microbatches),
    }
