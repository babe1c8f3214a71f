"""Compares a plan's trace with the reference's. Pure: nothing is run here.

Before the first step, the initial weights are compared. In each step, in this order: the samples of
every microbatch, and what its batch holds; if ranks hold full parameters, each microbatch's own
gradient, bit for bit, and the sum of all of them in float64; the reduced gradient and its norm; the
learning rate; the optimizer states, parameters and buffers; the loss and its weight. If all that is
the same, the numbers that the script has logged and gathered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from lockstep.data.digests import differing_part
from lockstep.evidence.tensors import Summaries, TensorSummary, distance, pooled
from lockstep.evidence.tolerance import TOLERANCE, MeasuredRounding
from lockstep.evidence.trace import Trace, tensor_distance

SUM_TOLERANCE = 4.0
"""Largest distance of a reduced gradient from the float64 sum of its microbatches', in multiples of
its rounding."""
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
"""The compared value of each check. Differences at one step are reported in this order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A value that differs by more than the tolerance."""

    step: int
    """`BEFORE_FIRST_STEP` for an initial value."""
    check: Check
    name: str = ""
    """Name of the tensor, if the check is about one."""
    rank: int = 0
    times_rounding: float = math.inf
    """Distance from the reference, in multiples of rounding."""
    relative: float = math.inf
    """Distance from the reference, relative to the reference's norm."""
    microbatches: tuple[int, ...] = ()
    """Microbatches involved. Empty: all of the step."""


@dataclass(kw_only=True, slots=True)
class Comparison:
    """A plan's trace compared with the reference's."""

    plan: str
    steps: int
    bitwise: bool
    differences: list[Difference] = field(default_factory=list)
    """Differences at the first step that has any, in the order of the computation."""
    largest: Difference | None = None
    """The largest difference in multiples of rounding, within the tolerance or not. None: no bit
    differs."""
    divergence: dict[str, list[float]] = field(default_factory=dict)
    """Relative distance from the reference at each step, tensors pooled, for `gradients`,
    `parameters` and `loss`."""
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
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Compare `plan` with `reference`: bit for bit if `bitwise`, else to `tolerance`, in multiples
    of rounding."""
    steps = min(reference.steps, plan.steps)
    comparison = Comparison(plan=plan.plan, steps=steps, bitwise=bitwise)
    comparator = _Comparator(reference, plan, rounding, bitwise, tolerance, comparison)
    _compare(comparator, steps, _CHECKS)
    if comparison.passed:
        _compare_logged(comparator)
    if plan.steps != reference.steps and comparison.passed:
        comparison.differences = [Difference(step=steps, check="samples")]
    comparison.divergence = divergence(reference, plan, steps)
    return comparison


def _compare_logged(comparator: _Comparator) -> None:
    """Compare what the script has logged and got from all ranks, once the model is known to be the
    same. A number that one process does not repeat, or of which that is not known, is not compared:
    a note says so."""
    reference, plan = comparator.reference.logged, comparator.plan.logged
    not_compared: dict[str, None] = {}
    for step in sorted(reference.keys() & plan.keys()):
        found: list[Difference] = []
        for name in {**reference[step], **plan[step]}:
            ours, theirs = reference[step].get(name, math.nan), plan[step].get(name, math.nan)
            if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
                continue
            difference = Difference(step=step, check="logged", name=name)
            if math.isnan(ours) or math.isnan(theirs):
                found.append(difference)
                continue
            rounding = comparator.rounding.of_logged(step, name)
            if math.isinf(rounding) or not (comparator.rounding.is_measured or ", call " in name):
                not_compared[name] = None
                continue
            found += comparator.judge(
                difference, distance=abs(theirs - ours), rounding=rounding, norm=abs(ours)
            )
        if found:
            comparator.comparison.differences = found
            break
    if not_compared:
        comparator.comparison.notes.append(
            "logged values that differ and were not compared, because one process may not repeat"
            f" them: {', '.join(not_compared)}"
        )


def compare_compressed(exact: Trace, compressed: Trace) -> Comparison:
    """Compare a run that compresses its gradients with the same run without compression.

    Checks only samples, missing gradients, and that ranks agree, which compression may not change.
    """
    steps = min(exact.steps, compressed.steps)
    comparison = Comparison(plan=compressed.plan, steps=steps, bitwise=False)
    comparator = _Comparator(
        exact, compressed, MeasuredRounding(exact, []), False, TOLERANCE, comparison
    )
    _compare(comparator, steps, checks=(_samples, _batches, _missing, _ranks))
    comparison.divergence = divergence(exact, compressed, steps)
    return comparison


def divergence(reference: Trace, other: Trace, steps: int) -> dict[str, list[float]]:
    """Return the relative distance at each step of the loss, and of all gradients and all
    parameters together."""
    found: dict[str, list[float]] = {"gradients": [], "parameters": [], "loss": []}
    for step in range(steps):
        ours, theirs = reference.rank_0.steps[step], other.rank_0.steps[step]
        for kind in ("gradients", "parameters"):
            summaries = ours.tensors[kind]
            away = [tensor_distance(reference, other, step, kind, name) for name in summaries]
            found[kind].append(pooled(away, summaries))
        found["loss"].append(abs(theirs.loss - ours.loss) / (abs(ours.loss) or 1.0))
    return found


@dataclass(slots=True)
class _Comparator:
    reference: Trace
    plan: Trace
    rounding: MeasuredRounding
    bitwise: bool
    tolerance: float
    comparison: Comparison

    def judge(
        self, found: Difference, *, distance: float, rounding: float, norm: float
    ) -> Iterator[Difference]:
        """Yield the difference if `distance` exceeds the tolerance; record it if it is the largest
        so far."""
        if distance == 0.0:
            return
        found = replace(
            found, times_rounding=distance / rounding, relative=_relative(distance, norm)
        )
        largest = self.comparison.largest
        if largest is None or found.times_rounding > largest.times_rounding:
            self.comparison.largest = found
        if self.bitwise or not found.times_rounding <= self.tolerance:
            yield found


_CheckFunction = Callable[[_Comparator, int], Iterator[Difference]]


def _compare(comparator: _Comparator, steps: int, checks: Sequence[_CheckFunction]) -> None:
    differences = list(_initial(comparator))
    for step in range(steps):
        if differences:
            break
        for check in checks:
            differences += check(comparator, step)
    positions = {
        name: position for position, name in enumerate(comparator.reference.backward_order)
    }
    order = list(DESCRIPTIONS)

    def position(found: Difference) -> tuple[int, int, int]:
        parameter = found.name.partition("/")[0] if found.check == "states" else found.name
        return order.index(found.check), positions.get(parameter, 0), found.rank

    comparator.comparison.differences = sorted(differences, key=position)


def _initial(comparator: _Comparator) -> Iterator[Difference]:
    for rank, entry in comparator.plan.ranks.items():
        for kind in ("parameters", "buffers"):
            ours, theirs = comparator.reference.rank_0.initial[kind], entry.initial[kind]
            for name in {**ours, **theirs}:
                away = distance(ours.get(name), theirs.get(name))
                if away:
                    relative = _relative(away, _norm(ours.get(name)))
                    yield Difference(
                        step=BEFORE_FIRST_STEP,
                        check="initial",
                        name=name,
                        rank=rank,
                        relative=relative,
                    )


def _samples(comparator: _Comparator, step: int) -> Iterator[Difference]:
    ours = {m.index: m.samples for m in comparator.reference.microbatches_of(step)}
    microbatches = comparator.plan.microbatches_of(step)
    theirs = {m.index: m.samples for m in microbatches}
    # Every rank that holds a part of the model notes the microbatch: the lowest rank's entries are
    # counted.
    lowest = {m.index: m.rank for m in reversed(microbatches)}
    times = Counter(m.index for m in microbatches if m.rank == lowest[m.index])
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index) or times[index] > 1:
            yield Difference(
                step=step, check="samples", rank=lowest.get(index, 0), microbatches=(index,)
            )


def _batches(comparator: _Comparator, step: int) -> Iterator[Difference]:
    ours = {m.index: m for m in comparator.reference.microbatches_of(step)}
    for microbatch in comparator.plan.microbatches_of(step):
        expected = ours.get(microbatch.index)
        if (
            expected is None
            or expected.samples != microbatch.samples
            or not (expected.batch and microbatch.batch)
        ):
            continue
        if (part := differing_part(expected.batch, microbatch.batch)) is not None:
            yield Difference(
                step=step,
                check="batch",
                name=f"batch{part}",
                rank=microbatch.rank,
                microbatches=(microbatch.index,),
            )


def first_other_data(reference: Trace, other: Trace) -> Difference | None:
    """Return the first batch in which two runs that differ by noise alone hold other data."""
    comparator = _Comparator(
        reference,
        other,
        MeasuredRounding(reference, []),
        True,
        0.0,
        Comparison(plan="", steps=0, bitwise=True),
    )
    steps = range(min(reference.steps, other.steps))
    return next(
        (
            found
            for step in steps
            for check in (_samples, _batches)
            for found in check(comparator, step)
        ),
        None,
    )


def _microbatches(comparator: _Comparator, step: int) -> Iterator[Difference]:
    """Check each microbatch's own gradient while the parameters have the reference's bits."""
    if step and not comparator.bitwise:  # only in the first step
        return
    ours = {m.index: m.gradients for m in comparator.reference.microbatches_of(step)}
    differ = 0
    for microbatch in comparator.plan.microbatches_of(step):
        expected, found = ours.get(microbatch.index), microbatch.gradients
        if expected is None or found is None:
            continue
        rounding: dict[str, float] = {}
        for name, summary in expected.items():
            away = distance(summary, found.get(name))
            if away == 0.0:
                continue
            differ += 1
            rounding = rounding or comparator.rounding.of_microbatch(step, microbatch.index)
            difference = Difference(
                step=step,
                check="microbatch",
                name=name,
                rank=microbatch.rank,
                microbatches=(microbatch.index,),
            )
            yield from comparator.judge(
                difference, distance=away, rounding=rounding.get(name, 1e-38), norm=_norm(summary)
            )
    # With several train modules, one module's forward may run another that this step has updated
    # already.
    alone = comparator.plan.metadata.get("modules", 1) == 1
    if differ and alone and not comparator.bitwise and "compile=yes" not in comparator.plan.plan:
        comparator.comparison.notes.append(
            f"step {step}: {differ} gradients of single microbatches differ from the reference's in"
            " some bits; on one kind of machine and with the same number of threads they"
            " should not"
        )


def _missing(comparator: _Comparator, step: int) -> Iterator[Difference]:
    ours = comparator.reference.rank_0.steps[step].tensors["gradients"]
    for rank, entry in comparator.plan.ranks.items():
        theirs = entry.steps[step].tensors["gradients"]
        for name in {**ours, **theirs}:
            if (ours.get(name) is None) != (theirs.get(name) is None):
                yield Difference(step=step, check="missing", name=name, rank=rank)


def _sums(comparator: _Comparator, step: int) -> Iterator[Difference]:
    """Check the reduced gradient of ranks that hold full parameters against the microbatches' sum
    in float64."""
    # With numerics=fast a plan may scale the loss before the backward (by 3, say). A gradient that
    # nearly cancels is then rounded differently. There the gradient may also miss the sum by as
    # much as the perturbed runs differ.
    measured = {} if comparator.bitwise else comparator.rounding.of_tensors(step, "gradients")
    parts = [m.gradients for m in comparator.plan.microbatches_of(step) if m.gradients is not None]
    if not parts or len(parts) < len(comparator.reference.microbatches_of(step)):
        return
    for rank, entry in comparator.plan.ranks.items():
        gain = entry.steps[step].gain
        for name, total in entry.steps[step].tensors["gradients"].items():
            terms = [term for gradients in parts if (term := gradients.get(name)) is not None]
            if total is None or not terms or math.isnan(total.norm):
                continue
            away, rounding = sum_error(total, terms, gain)
            rounding = max(rounding, measured.get(name, 0.0))
            if not away <= SUM_TOLERANCE * rounding:
                # Scaled so that, as for other checks, more than `tolerance` fails.
                times = (
                    comparator.tolerance / SUM_TOLERANCE * away / rounding if rounding else math.inf
                )
                relative = away / (total.norm or 1.0)
                yield Difference(
                    step=step,
                    check="sum",
                    name=name,
                    rank=rank,
                    times_rounding=times,
                    relative=relative,
                )


def sum_error(total: TensorSummary, terms: list[TensorSummary], gain: float) -> tuple[float, float]:
    """Return the distance of `total` from the float64 sum of `terms` times `gain`, and the rounding
    of that sum."""
    expected = gain * np.sum([term.projection for term in terms], axis=0)
    away = float(np.sqrt(np.mean((expected - total.projection) ** 2)))
    # Each partial sum is rounded by half a unit in the last place and is at most as large as all
    # terms together. The errors add up like a random walk.
    rounding = (
        0.5 * total.eps * math.sqrt(len(terms) + 2) * abs(gain) * sum(term.norm for term in terms)
    )
    return away, rounding


def _tensors(comparator: _Comparator, step: int) -> Iterator[Difference]:
    ours = comparator.reference.rank_0.steps[step].tensors
    for kind in ("gradients", "states", "parameters", "buffers"):
        rounding = comparator.rounding.of_tensors(step, kind)
        for rank, entry in comparator.plan.ranks.items():
            theirs = entry.steps[step].tensors[kind]
            for name, summary in ours[kind].items():
                found = theirs.get(name)
                if kind == "gradients" and (summary is None) != (found is None):
                    continue  # `_missing` reports it
                away = (
                    distance(summary, found)
                    if rank
                    else tensor_distance(comparator.reference, comparator.plan, step, kind, name)
                )
                difference = Difference(step=step, check=kind, name=name, rank=rank)
                yield from comparator.judge(
                    difference,
                    distance=away,
                    rounding=rounding.get(name, 1e-38),
                    norm=_norm(summary),
                )


def _scalars(comparator: _Comparator, step: int) -> Iterator[Difference]:
    ours = comparator.reference.rank_0.steps[step]
    for rank, entry in comparator.plan.ranks.items():
        theirs = entry.steps[step]
        if ours.norm is not None and theirs.norm is not None:
            away, rounding = (
                abs(theirs.norm - ours.norm),
                comparator.rounding.of_scalar(step, "norm"),
            )
            yield from comparator.judge(
                Difference(step=step, check="norm", rank=rank),
                distance=away,
                rounding=rounding,
                norm=ours.norm,
            )
        if not (math.isnan(ours.loss) and math.isnan(theirs.loss)):
            away, rounding = (
                abs(theirs.loss - ours.loss),
                comparator.rounding.of_scalar(step, "loss"),
            )
            difference = Difference(step=step, check="loss", rank=rank)
            yield from comparator.judge(
                difference, distance=away, rounding=rounding, norm=abs(ours.loss)
            )
        if ours.lr != theirs.lr:
            yield Difference(step=step, check="lr", rank=rank)
        if not math.isclose(ours.weight or 0.0, theirs.weight or 0.0, rel_tol=1e-6):
            yield Difference(step=step, check="weight", rank=rank)


def _ranks(comparator: _Comparator, step: int) -> Iterator[Difference]:
    """Check that ranks which hold the whole model hold the same bits of it."""
    rank_0 = comparator.plan.rank_0.steps[step].tensors
    for rank, entry in comparator.plan.ranks.items():
        for kind in ("gradients", "parameters", "buffers"):
            theirs: Summaries = entry.steps[step].tensors[kind]
            for name, summary in rank_0[kind].items():
                away = distance(summary, theirs.get(name))
                if rank and away:
                    relative = _relative(away, _norm(summary))
                    yield Difference(
                        step=step, check="ranks", name=name, rank=rank, relative=relative
                    )


def _norm(summary: TensorSummary | None) -> float:
    return summary.norm if summary is not None else 0.0


def _relative(distance: float, norm: float) -> float:
    return distance / norm if norm else math.inf


_CHECKS: tuple[_CheckFunction, ...] = (
    _samples,
    _batches,
    _microbatches,
    _missing,
    _sums,
    _tensors,
    _scalars,
    _ranks,
)
