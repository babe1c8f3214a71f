"""Runs the reference and each plan, compares their traces, and gives a verdict on each plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.base.errors import DataError, RecipeError
from lockstep.evidence.tensors import COMPUTE_EPS, EPS
from lockstep.evidence.tolerance import MeasuredRounding
from lockstep.evidence.trace import Trace
from lockstep.plan import Plan
from lockstep.scripts.line import ScriptLine
from lockstep.verify import jobs
from lockstep.verify.causes import balance, experts, gradients, microbatches, tokens, updates
from lockstep.verify.causes.evidence import Evidence
from lockstep.verify.compare import (
    DESCRIPTIONS,
    Check,
    Comparison,
    compare_compressed,
    compare_traces,
    first_other_data,
)
from lockstep.verify.jobs import FAST_REFERENCE, FLOAT64_PERTURBED_RUNS
from lockstep.verify.runner import JobResult, Runner
from lockstep.verify.verdict import CompressionEffect, Mismatch, Report, Verdict

FLOAT64_MARGIN = 4.0
"""Factor on the rounding measured in float64. A margin is needed because the ratio of two dtypes'
rounding is not exactly the ratio of their precisions."""
MAX_SPREAD = 0.2
"""Largest relative difference of the first gradient between two runs that differ only by
rounding."""
MICROBATCH_SIZE_MINIMUM = 1e-9
MICROBATCH_SIZE_ULPS = 100.0
"""Largest rounding that another microbatch size may cause, in units in the last place."""

_CAUSES: Mapping[Check, Sequence[Callable[[Evidence], str | None]]] = {
    "initial": (experts.initial_values, microbatches.initial_weights),
    "samples": (microbatches.samples,),
    "batch": (microbatches.other_data,),
    "microbatch": (
        updates.earlier_update,
        microbatches.random_state,
        balance.own_tokens,
        microbatches.scaled_microbatches,
        tokens.lost_tokens,
        tokens.pairs_at_cuts,
        tokens.document_leak,
        tokens.places_of_others,
        microbatches.kept_state,
        tokens.attention_backward,
        microbatches.batchnorm_of_microbatch,
        microbatches.other_input,
    ),
    "missing": (experts.router_gradient, gradients.missing_gradient),
    "gradients": (
        updates.earlier_update,
        balance.own_tokens,
        balance.scaled_term,
        experts.rows,
        experts.router_gradient,
        experts.wrong_expert_factor,
        gradients.wrong_sum,
        microbatches.random_state,
        tokens.lost_tokens,
        tokens.pairs_at_cuts,
        tokens.document_leak,
        tokens.places_of_others,
        gradients.short_dtype,
        gradients.few_elements,
        tokens.attention_backward,
    ),
    "sum": (gradients.wrong_sum,),
    "norm": (experts.expert_clipping, updates.clipping),
    "lr": (updates.learning_rate,),
    "states": (experts.expert_optimizer_state, updates.optimizer_state),
    "parameters": (updates.parameter_update,),
    "buffers": (updates.buffer,),
    "ranks": (updates.ranks_disagree,),
    "loss": (updates.logged_loss,),
    "weight": (updates.loss_weight,),
    "logged": (updates.logged_value,),
}
"""The functions that look for the cause of each kind of difference. The search for a cause calls
the functions in order until one returns a text."""
_SCALAR_LOSS = (
    "It is probably a mean over tokens (or pixels, or whatever is not ignored), returned as a plain"
    " scalar, so that every microbatch counts the same: return ls.Sum(total), and give"
    " Recipe.weight = batch -> the number to divide by."
)
_WEIGHTED_LOSS = (
    "With weights, its total must be a sum over samples: it may be a mean all the same, or depend"
    " on the size of the microbatch, or the model keeps state from one microbatch to the next (a"
    " counter, a cache, a hidden state)."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    plans: Sequence[tuple[Plan, int]]
    """Plans, each with its number of processes."""
    steps: int
    float64: bool
    """True to repeat the first step in float64."""
    check_microbatch_size: bool
    """True to check that the loss does not depend on the microbatch size."""


class Verification:
    """Starts all runs that verify the plans, and compares their traces."""

    def __init__(self, line: ScriptLine, options: VerifyOptions, runner: Runner) -> None:
        self._options = options
        self._runner = runner
        self._report = Report(script=line.script, steps=options.steps)
        self._line = line
        self._microbatch: int | None = None
        self._fast = any(plan.numerics == "fast" for plan, _ in options.plans)

    def run(self) -> Report:
        """Raise `LaunchError` if the script fails or never trains on one process. Raise `DataError`
        or `RecipeError` if runs on one process differ by more than rounding."""
        references = self._references()
        with self._runner.queueing_the_rest():
            started = self._start(next(iter(references.values()))[0].metadata)
        rounding = {
            plan: [MeasuredRounding(each, []) for each in traces]
            for plan, traces in references.items()
        }
        if self._fast:
            results = [future.result() for future in started.perturbed]
            perturbed = [_traces(each, "a perturbed run", self._line) for each in results]
            self._check_data(references[FAST_REFERENCE], perturbed)
            rounding[FAST_REFERENCE] = [
                MeasuredRounding(trace, [run[module] for run in perturbed])
                for module, trace in enumerate(references[FAST_REFERENCE])
            ]
            self._note_spread(rounding[FAST_REFERENCE][0])
            self._check_spread()
        rounding_in_float64 = self._rounding_in_float64(started, rounding.get(FAST_REFERENCE, []))
        runs = (started.plans, started.float64_plans, started.compressed)
        for (plan, processes), run, float64_run, compressed_run in zip(
            self._options.plans, *runs, strict=True
        ):
            result = run.result()
            verdict = Verdict(
                plan=str(plan),
                processes=processes,
                bitwise=plan.numerics == "bitwise",
                seconds=result.seconds,
            )
            if _ran(verdict, result):
                _judge(verdict, result, rounding[jobs.reference_plan(plan)])
            if verdict.ran and float64_run is not None and rounding_in_float64:
                _judge(verdict, float64_run.result(), rounding_in_float64, float64=True)
            if verdict.ran and compressed_run is not None:
                _judge_compressed(verdict, result.traces, compressed_run.result())
            self._report.verdicts.append(verdict)
        self._check_microbatch_size(started)
        return self._report

    def _references(self) -> dict[Plan, list[Trace]]:
        traces = self._run_references()
        metadata = next(iter(traces.values()))[0].metadata
        if metadata["microbatch"] is None and metadata["global_batch"]:
            self._microbatch = jobs.microbatch_for_all(
                metadata["global_batch"], self._options.plans
            )
            self._report.notes.append(
                "the recipe sets no microbatch, so dropout and BatchNorm depend on the plan;"
                f" verified with microbatch={self._microbatch} under every plan"
            )
            traces = self._run_references()
        self._report.steps = min(self._options.steps, next(iter(traces.values()))[0].steps)
        return traces

    def _run_references(self) -> dict[Plan, list[Trace]]:
        references = jobs.reference_jobs(self._options.plans, self._options.steps, self._microbatch)
        results = self._runner.run(list(references.values()))
        return {
            plan: _traces(result, "one process", self._line)
            for plan, result in zip(references, results, strict=True)
        }

    def _start(self, metadata: Mapping[str, Any]) -> _StartedRuns:
        options, start = self._options, self._runner.start
        plan_jobs = [
            jobs.plan_job(plan, processes, options.steps, self._microbatch)
            for plan, processes in options.plans
        ]
        started = _StartedRuns(plans=[start(job) for job in plan_jobs])
        started.compressed = [
            None if metadata["gradient_compression"] == "none" else start(jobs.compressed(job))
            for job in plan_jobs
        ]
        if self._fast:
            started.perturbed = [
                start(job) for job in jobs.perturbed_jobs(options.steps, self._microbatch)
            ]
        if float64 := options.float64 and self._fast:
            references = jobs.reference_jobs(options.plans, options.steps, self._microbatch)
            started.float64_reference = start(jobs.in_float64(references[FAST_REFERENCE]))
            perturbed = jobs.perturbed_jobs(1, self._microbatch, FLOAT64_PERTURBED_RUNS)
            started.float64_perturbed = [start(jobs.in_float64(job)) for job in perturbed]
        started.float64_plans = [
            start(jobs.in_float64(job)) if float64 and job.plan.numerics == "fast" else None
            for job in plan_jobs
        ]
        if options.check_microbatch_size and not metadata["global_batch"]:
            self._report.notes.append(
                "the loss was not tried with another microbatch size: the batch_sampler makes the"
                " microbatches"
            )
        elif options.check_microbatch_size:
            size = self._microbatch or metadata["microbatch"]
            started.microbatch_sizes = [
                start(job) for job in jobs.microbatch_size_jobs(metadata["global_batch"], size)
            ]
        return started

    def _rounding_in_float64(
        self, started: _StartedRuns, fast: Sequence[MeasuredRounding]
    ) -> list[MeasuredRounding]:
        """Return the rounding of each model in float64, from the rounding `fast` in the recipe's
        precision."""
        if started.float64_reference is None:
            return []
        result = started.float64_reference.result()
        perturbed = [future.result().traces for future in started.float64_perturbed]
        if not (result.traces and all(perturbed)):
            self._report.notes.append(
                "the first step was not repeated in float64: the script fails in it"
                f" ({_last_line(result.error)})"
            )
            return []
        metadata = result.traces[0].metadata
        if operations := ", ".join(metadata.get("short_dtype_operations", [])):
            self._report.notes.append(
                "the float64 run is only as exact as these operations, which return a shorter"
                f" dtype: {operations}"
            )
        compute = COMPUTE_EPS[fast[0].reference.metadata["precision"]]
        scale = FLOAT64_MARGIN * max(metadata.get("eps", EPS["float64"]), EPS["float64"]) / compute
        modules = zip(fast, result.traces, *perturbed, strict=True)
        return [
            rounding.in_float64(trace, runs, scale=scale, margin=FLOAT64_MARGIN)
            for rounding, trace, *runs in modules
        ]

    def _check_data(self, reference: Sequence[Trace], perturbed: Sequence[Sequence[Trace]]) -> None:
        for run in perturbed:
            for ours, theirs in zip(reference, run, strict=True):
                if (found := first_other_data(ours, theirs)) is not None:
                    raise DataError(
                        f"two runs of {self._line.script} on one process have other data:"
                        f" {DESCRIPTIONS[found.check]} of microbatch {found.microbatches[0]} after"
                        f" step {found.step}; {microbatches.OTHER_DATA}"
                    )

    def _check_spread(self) -> None:
        """Raise `RecipeError` if the gradients of perturbed runs differ by more than rounding. The
        tolerance cannot be computed from larger differences."""
        spread = self._report.rounding_spread["gradients"][0][1]
        if spread > MAX_SPREAD:
            raise RecipeError(
                f"two runs of {self._line.script} on one process have gradients of the first step"
                f" that differ by {spread:.2g} of their norm, from the same weights and data, so"
                " nothing can be compared; the model or the loss draws from a generator that nobody"
                " seeds, or reads the clock: draw from torch's default generators; or the precision"
                " is too short for it, as bf16 is for BatchNorm over two samples: verify it in fp32"
            )

    def _note_spread(self, rounding: MeasuredRounding) -> None:
        steps = range(self._report.steps)
        self._report.rounding_spread = {
            kind: [rounding.spread(step, kind) for step in steps]
            for kind in ("gradients", "parameters")
        }
        self._report.rounding_spread["loss"] = [rounding.loss_spread(step) for step in steps]

    def _check_microbatch_size(self, started: _StartedRuns) -> None:
        results = [future.result() for future in started.microbatch_sizes]
        if len(results) < 2:
            return
        failed = [_last_line(result.error) for result in results if not result.traces]
        if not failed and any(m.drew_random_numbers for m in results[0].traces[0].microbatches):
            failed = ["the forward draws random numbers even in eval mode"]
        if failed:
            text = f"the loss was not tried with another microbatch size: {failed[0]}"
            self._report.notes.append(text)
            return
        ours, theirs = (result.traces[0] for result in results)
        size = results[1].job.microbatch or 0
        self._report.microbatch_size_checked = True
        self._report.microbatch_size_mismatch = compare_microbatch_sizes(ours, theirs, size)


@dataclass(kw_only=True, slots=True)
class _StartedRuns:
    plans: list[Future[JobResult]]
    compressed: list[Future[JobResult] | None] = field(default_factory=list)
    float64_plans: list[Future[JobResult] | None] = field(default_factory=list)
    perturbed: list[Future[JobResult]] = field(default_factory=list)
    float64_reference: Future[JobResult] | None = None
    float64_perturbed: list[Future[JobResult]] = field(default_factory=list)
    microbatch_sizes: list[Future[JobResult]] = field(default_factory=list)


def compare_microbatch_sizes(reference: Trace, other: Trace, size: int) -> Mismatch | None:
    minimum = max(
        MICROBATCH_SIZE_MINIMUM, MICROBATCH_SIZE_ULPS * reference.metadata.get("eps", 0.0)
    )
    rounding = MeasuredRounding(reference, [], minimum=minimum)
    ours, theirs = (replace(each, microbatches=[]) for each in (reference, other))
    comparison = compare_traces(ours, theirs, rounding, bitwise=False)
    checks = ("gradients", "missing", "loss")
    wrong = [each for each in comparison.differences if each.check in checks]
    if not wrong:
        return None
    cause = (
        f"the loss is not a sum over samples: split into microbatches of {size} instead of"
        f" {reference.metadata['microbatch']}, the same batch has another gradient."
        f" {_SCALAR_LOSS if reference.rank_0.steps[0].weight is None else _WEIGHTED_LOSS} If the"
        " loss is meant to look at a microbatch as a whole (contrastive losses), or the dataset's"
        " __getitems__ or collate_fn draws random numbers for a microbatch as a whole (negative"
        " samples), give --whole-microbatch-loss"
    )
    return Mismatch(difference=wrong[0], float64=True, cause=cause)


def _ran(verdict: Verdict, result: JobResult) -> bool:
    if not result.traces:
        verdict.ran, verdict.exit_status = False, result.status or 1
        timed_out = "the run timed out; " if result.timed_out else ""
        verdict.error = timed_out + (result.error or "it ended without a step")
    return verdict.ran


def _judge(
    verdict: Verdict,
    result: JobResult,
    modules: Sequence[MeasuredRounding],
    *,
    float64: bool = False,
) -> None:
    if not result.traces:
        verdict.notes.append(f"not repeated in float64 under this plan: {_last_line(result.error)}")
        return
    for rounding, trace in zip(modules, result.traces, strict=True):
        bitwise = verdict.bitwise and not float64
        comparison = compare_traces(rounding.reference, trace, rounding, bitwise=bitwise)
        (verdict.float64 if float64 else verdict.comparisons).append(comparison)
        if not float64:
            verdict.notes += comparison.notes
        _note_mismatch(verdict, comparison, rounding.reference, trace, float64=float64)


def _judge_compressed(verdict: Verdict, exact: Sequence[Trace], result: JobResult) -> None:
    """Add the effect of gradient compression to the verdict. Compression fails a plan only if the
    ranks disagree."""
    if not _ran(verdict, result):
        return
    for without, trace in zip(exact, result.traces, strict=True):
        comparison = compare_compressed(without, trace)
        divergence = comparison.divergence
        verdict.compression.append(
            CompressionEffect(
                gradient_compression=trace.metadata["gradient_compression"],
                steps=comparison.steps,
                gradient=divergence["gradients"][0],
                parameters=divergence["parameters"][-1],
                loss=divergence["loss"][-1],
            )
        )
        _note_mismatch(verdict, comparison, without, trace, float64=False)


def _note_mismatch(
    verdict: Verdict, comparison: Comparison, reference: Trace, trace: Trace, *, float64: bool
) -> None:
    """Record the first difference of a comparison with its likely cause, unless the verdict already
    has a difference in this step or an earlier one."""
    if not comparison.differences:
        return
    first, known = comparison.differences[0], verdict.mismatch
    # The single step of the float64 run may show what the recipe's precision hides until a later
    # step.
    if known is None or first.step < known.difference.step:
        cause = likely_cause(Evidence(reference, trace, comparison.differences))
        verdict.mismatch = Mismatch(difference=first, float64=float64, cause=cause)


def likely_cause(evidence: Evidence) -> str | None:
    for cause in _CAUSES[evidence.first.check]:
        if text := cause(evidence):
            return text
    return None


def _traces(result: JobResult, under: str, line: ScriptLine) -> list[Trace]:
    if not result.traces:
        many = f"its last of {result.job.steps} training steps"
        raise result.nothing_done(
            line,
            before=f"{many if result.timed_out else 'a training step'} under {under}",
            needs="verify compares the steps of ls.train or ls.Session",
            works=f"lockstep run --nproc 1 {line}",
        )
    return result.traces


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if not line.startswith("The others:")]
    return next((line[:200] for line in reversed(lines) if line), "it ended without a step")
