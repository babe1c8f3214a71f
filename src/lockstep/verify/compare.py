"""Compares the trace of a run under a plan with the trace of a reference run on one process.

The values of a step are compared in the order in which the step computes them: samples,
microbatches, reduced gradient, learning rate, optimizer state, parameters, loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from lockstep.data.digests import differing_part
from lockstep.evidence.tensors import TensorSummary, distance, pooled
from lockstep.evidence.tolerance import TOLERANCE, MeasuredRounding
from lockstep.evidence.trace import Trace, tensor_distance

SUM_TOLERANCE = 4.0
"""Largest distance of a reduced gradient from the float64 sum of its microbatches' gradients, in
multiples of the rounding of the sum."""
BEFORE_FIRST_STEP = -1

Check = Literal[
    "initial", "samples", "batch", "microbatch", "missing", "gradients", "sum", "norm", "lr",
    "states", "parameters", "buffers", "ranks",
    "loss", "weight", "logged",
]  # fmt: skip
DESCRIPTIONS: Mapping[Check, str] = {
    "initial": "initial value",
    "samples": "samples",
    "batch": "contents of a batch",
    "microbatch": "gradient of one microbatch",
    "missing": "missing gradient",
    "gradients": "gradient",
    "sum": "sum of the microbatches' gradients",
    "norm": "gradient norm",
    "lr": "learning rate",
    "states": "optimizer state",
    "parameters": "parameter",
    "buffers": "buffer",
    "ranks": "value on another rank",
    "loss": "loss",
    "weight": "weight of the loss",
    "logged": "logged value",
}
"""Descriptions of the compared values, in the order of comparison."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A value of a plan's run that differs from the reference by more than the tolerance."""

    step: int
    check: Check
    name: str = ""
    rank: int = 0
    times_rounding: float = math.inf
    relative: float = math.inf
    microbatches: tuple[int, ...] = ()
    """Microbatches with the difference; empty for all."""


@dataclass(kw_only=True, slots=True)
class Comparison:
    """The result of comparing a plan's trace with the reference."""

    plan: str
    steps: int
    bitwise: bool
    differences: list[Difference] = field(default_factory=list)
    """The differences in the first step that differs."""
    largest: Difference | None = None
    """The largest difference in all steps, which may be within the tolerance. None if all bits
    agree."""
    divergence: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.differences


def compare_traces(
    reference: Trace,
    plan: Trace,
    rounding: MeasuredRounding,
    *,
    bitwise: bool,
) -> Comparison:
    comparator = _Comparator(reference, plan, rounding, bitwise)
    comparison = comparator.run(
        comparator.samples,
        comparator.batches,
        comparator.microbatches,
        comparator.missing,
        comparator.sums,
        comparator.tensors,
        comparator.scalars,
        comparator.ranks,
    )
    if comparison.passed:
        comparator.compare_logged()
    if plan.steps != reference.steps and comparison.passed:
        comparison.differences = [Difference(step=comparison.steps, check="samples")]
    return comparison


def compare_compressed(exact: Trace, compressed: Trace) -> Comparison:
    """Compare only the values that gradient compression must not change: samples, missing
    gradients, and the agreement of the ranks."""
    comparator = _Comparator(exact, compressed, MeasuredRounding(exact, []))
    return comparator.run(
        comparator.samples, comparator.batches, comparator.missing, comparator.ranks
    )


def first_other_data(reference: Trace, other: Trace) -> Difference | None:
    comparator = _Comparator(reference, other, MeasuredRounding(reference, []))
    steps, checks = range(comparator.comparison.steps), (comparator.samples, comparator.batches)
    return next((found for step in steps for check in checks for found in check(step)), None)


def divergence(reference: Trace, other: Trace, steps: int) -> dict[str, list[float]]:
    distances: dict[str, list[float]] = {"gradients": [], "parameters": [], "loss": []}
    for step in range(steps):
        ours, theirs = reference.rank_0.steps[step], other.rank_0.steps[step]
        for kind in ("gradients", "parameters"):
            summaries = ours.tensors[kind]
            away = [tensor_distance(reference, other, step, kind, name) for name in summaries]
            distances[kind].append(pooled(away, summaries))
        distances["loss"].append(abs(theirs.loss - ours.loss) / (abs(ours.loss) or 1.0))
    return distances


class _Comparator:
    """Compares a plan's trace with the reference, step by step."""

    def __init__(
        self,
        reference: Trace,
        plan: Trace,
        rounding: MeasuredRounding,
        bitwise: bool = False,
    ) -> None:
        self._reference, self._plan, self._rounding = reference, plan, rounding
        self._bitwise = bitwise
        steps = min(reference.steps, plan.steps)
        self.comparison = Comparison(plan=plan.plan, steps=steps, bitwise=bitwise)

    def run(self, *checks: Callable[[int], Iterator[Difference]]) -> Comparison:
        differences = list(self._initial())
        for step in range(self.comparison.steps):
            if differences:
                break
            for check in checks:
                differences += check(step)
        names = self._reference.backward_order
        positions = {name: position for position, name in enumerate(names)}
        order = list(DESCRIPTIONS)

        def position(found: Difference) -> tuple[int, int, int]:
            parameter = found.name.partition("/")[0] if found.check == "states" else found.name
            return order.index(found.check), positions.get(parameter, 0), found.rank

        self.comparison.differences = sorted(differences, key=position)
        self.comparison.divergence = divergence(self._reference, self._plan, self.comparison.steps)
        return self.comparison

    def _judge(
        self, found: Difference, *, distance: float, rounding: float, norm: float
    ) -> Iterator[Difference]:
        if distance == 0.0:
            return
        found = replace(
            found, times_rounding=distance / rounding, relative=_relative(distance, norm)
        )
        largest = self.comparison.largest
        if largest is None or found.times_rounding > largest.times_rounding:
            self.comparison.largest = found
        if self._bitwise or not found.times_rounding <= TOLERANCE:
            yield found

    def compare_logged(self) -> None:
        """Compare the numbers that the script has logged or reduced over all ranks. A difference in
        numbers that one process cannot reproduce is only noted."""
        reference, plan = self._reference.logged, self._plan.logged
        not_compared: dict[str, None] = {}
        for step in sorted(reference.keys() & plan.keys()):
            differences: list[Difference] = []
            for name in {**reference[step], **plan[step]}:
                ours, theirs = reference[step].get(name, math.nan), plan[step].get(name, math.nan)
                if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
                    continue
                difference = Difference(step=step, check="logged", name=name)
                away = abs(theirs - ours)
                if math.isnan(away):
                    differences.append(difference)
                    continue
                rounding = self._rounding.of_logged(step, name)
                if math.isinf(rounding) or not (self._rounding.is_measured or ", call " in name):
                    not_compared[name] = None
                    continue
                differences += self._judge(
                    difference, distance=away, rounding=rounding, norm=abs(ours)
                )
            if differences:
                self.comparison.differences = differences
                break
        if not_compared:
            self.comparison.notes.append(
                "logged values that differ and were not compared, because one process may not"
                f" repeat them: {', '.join(not_compared)}"
            )

    def _initial(self) -> Iterator[Difference]:
        for rank, entry in self._plan.ranks.items():
            for kind in ("parameters", "buffers"):
                ours, theirs = self._reference.rank_0.initial[kind], entry.initial[kind]
                for name in {**ours, **theirs}:
                    away = distance(ours.get(name), theirs.get(name))
                    if away:
                        yield Difference(
                            step=BEFORE_FIRST_STEP,
                            check="initial",
                            name=name,
                            rank=rank,
                            relative=_relative(away, _norm(ours.get(name))),
                        )

    def samples(self, step: int) -> Iterator[Difference]:
        ours = {m.index: m.samples for m in self._reference.microbatches_of(step)}
        microbatches = self._plan.microbatches_of(step)
        theirs = {m.index: m.samples for m in microbatches}
        # Every rank that has a part of the model records the microbatch; the entries of the lowest
        # rank are used.
        lowest = {m.index: m.rank for m in reversed(microbatches)}
        times = Counter(m.index for m in microbatches if m.rank == lowest[m.index])
        for index in sorted(ours.keys() | theirs.keys()):
            if ours.get(index) != theirs.get(index) or times[index] > 1:
                rank = lowest.get(index, 0)
                yield Difference(step=step, check="samples", rank=rank, microbatches=(index,))

    def batches(self, step: int) -> Iterator[Difference]:
        ours = {m.index: m for m in self._reference.microbatches_of(step)}
        for m in self._plan.microbatches_of(step):
            expected = ours.get(m.index)
            if expected is None or expected.samples != m.samples:
                continue
            if not (expected.batch and m.batch):
                continue
            if (part := differing_part(expected.batch, m.batch)) is not None:
                yield Difference(
                    step=step,
                    check="batch",
                    name=f"batch{part}",
                    rank=m.rank,
                    microbatches=(m.index,),
                )

    def microbatches(self, step: int) -> Iterator[Difference]:
        """Compare the gradient of each microbatch. With numerics=fast, compares only the first
        step, because the parameters differ in later steps."""
        if step and not self._bitwise:
            return
        ours = {m.index: m.gradients for m in self._reference.microbatches_of(step)}
        differ = 0
        for m in self._plan.whole_microbatches_of(step):
            expected, actual = ours.get(m.index), m.gradients
            if expected is None or actual is None:
                continue
            rounding: dict[str, float] = {}
            for name, summary in expected.items():
                away = distance(summary, actual.get(name))
                if away == 0.0:
                    continue
                differ += not m.together  # the sum of several ranks' parts has other rounding
                rounding = rounding or self._rounding.of_microbatch(step, m.index)
                yield from self._judge(
                    Difference(
                        step=step,
                        check="microbatch",
                        name=name,
                        rank=m.rank,
                        microbatches=(m.index,),
                    ),
                    distance=away,
                    rounding=rounding.get(name, 1e-38),
                    norm=_norm(summary),
                )
        # With several train modules, the forward of one may run another that this step has already
        # updated.
        alone = self._plan.metadata.get("modules", 1) == 1
        rounds_otherwise = any(
            each in self._plan.plan for each in ("compile=yes", "logits=chunked")
        )
        if differ and alone and not self._bitwise and not rounds_otherwise:
            self.comparison.notes.append(
                f"step {step}: {differ} gradients of single microbatches differ from the"
                " reference's in some bits; on one kind of machine and with the same number of"
                " threads they should not"
            )

    def missing(self, step: int) -> Iterator[Difference]:
        ours = self._reference.rank_0.steps[step].tensors["gradients"]
        for rank, entry in self._plan.ranks.items():
            theirs = entry.steps[step].tensors["gradients"]
            for name in {**ours, **theirs}:
                if (ours.get(name) is None) != (theirs.get(name) is None):
                    yield Difference(step=step, check="missing", name=name, rank=rank)

    def sums(self, step: int) -> Iterator[Difference]:
        """Compare the reduced gradient with the float64 sum of its microbatches' gradients."""
        # With numerics=fast a plan may scale the loss before the backward (by 3, say). A gradient
        # that nearly cancels is then rounded differently, so it may also differ from the sum by as
        # much as the perturbed runs differ.
        measured = {} if self._bitwise else self._rounding.of_tensors(step, "gradients")
        known = [m for m in self._plan.microbatches_of(step) if m.gradients is not None]
        every = {m.index for m in self._reference.microbatches_of(step)}
        if not known or not every <= {m.index for m in known}:
            return
        parts = [m.gradients or {} for m in known]
        for rank, entry in self._plan.ranks.items():
            gain = entry.steps[step].gain
            for name, total in entry.steps[step].tensors["gradients"].items():
                terms = [term for gradients in parts if (term := gradients.get(name)) is not None]
                if total is None or not terms or math.isnan(total.norm):
                    continue
                away, rounding = sum_error(total, terms, gain)
                allowed = SUM_TOLERANCE * max(rounding, measured.get(name, 0.0))
                if not away <= allowed:
                    yield Difference(
                        step=step,
                        check="sum",
                        name=name,
                        rank=rank,
                        # scaled so that, as for other checks, more than the tolerance fails
                        times_rounding=TOLERANCE * away / allowed if allowed else math.inf,
                        relative=away / (total.norm or 1.0),
                    )

    def tensors(self, step: int) -> Iterator[Difference]:
        ours = self._reference.rank_0.steps[step].tensors
        for kind in ("gradients", "states", "parameters", "buffers"):
            rounding = self._rounding.of_tensors(step, kind)
            for rank, entry in self._plan.ranks.items():
                theirs = entry.steps[step].tensors[kind]
                for name, summary in ours[kind].items():
                    actual = theirs.get(name)
                    if kind == "gradients" and (summary is None) != (actual is None):
                        continue  # `missing` reports this
                    if rank:
                        away = distance(summary, actual)
                    else:
                        away = tensor_distance(self._reference, self._plan, step, kind, name)
                    yield from self._judge(
                        Difference(step=step, check=kind, name=name, rank=rank),
                        distance=away,
                        rounding=rounding.get(name, 1e-38),
                        norm=_norm(summary),
                    )

    def scalars(self, step: int) -> Iterator[Difference]:
        ours = self._reference.rank_0.steps[step]
        for rank, entry in self._plan.ranks.items():
            theirs = entry.steps[step]
            pairs: list[tuple[Check, float | None, float | None]] = [
                ("norm", ours.norm, theirs.norm),
                ("loss", ours.loss, theirs.loss),
            ]
            for check, one, other in pairs:
                if one is None or other is None or (math.isnan(one) and math.isnan(other)):
                    continue
                yield from self._judge(
                    Difference(step=step, check=check, rank=rank),
                    distance=abs(other - one),
                    rounding=self._rounding.of_scalar(step, check),
                    norm=abs(one),
                )
            if ours.lr != theirs.lr:
                yield Difference(step=step, check="lr", rank=rank)
            if not math.isclose(ours.weight or 0.0, theirs.weight or 0.0, rel_tol=1e-6):
                yield Difference(step=step, check="weight", rank=rank)

    def ranks(self, step: int) -> Iterator[Difference]:
        rank_0 = self._plan.rank_0.steps[step].tensors
        for rank, entry in self._plan.ranks.items():
            for kind in ("gradients", "parameters", "buffers"):
                theirs = entry.steps[step].tensors[kind]
                for name, summary in rank_0[kind].items():
                    away = distance(summary, theirs.get(name))
                    if rank and away:
                        relative = _relative(away, _norm(summary))
                        yield Difference(
                            step=step, check="ranks", name=name, rank=rank, relative=relative
                        )


def sum_error(total: TensorSummary, terms: list[TensorSummary], gain: float) -> tuple[float, float]:
    """Return the distance of `total` from the float64 sum of `terms` times `gain`, and the rounding
    of the sum."""
    expected = gain * np.sum([term.projection for term in terms], axis=0)
    away = float(np.sqrt(np.mean((expected - total.projection) ** 2)))
    # Each partial sum is rounded by half a unit in the last place and is at most as large as all
    # terms together. The errors add up like a random walk.
    size = abs(gain) * sum(term.norm for term in terms)
    return away, 0.5 * total.eps * math.sqrt(len(terms) + 2) * size


def _norm(summary: TensorSummary | None) -> float:
    return summary.norm if summary is not None else 0.0


def _relative(distance: float, norm: float) -> float:
    return distance / norm if norm else math.inf
