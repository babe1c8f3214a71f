"""Two traces and a yardstick in, a verdict out. Pure: nothing is run here.

What is compared, in the order in which a step makes it: the samples of every microbatch; where ranks hold whole parameters, each
microbatch's own gradient, bit for bit with the reference's, and their sum in float64; the reduced gradient; the norm that is clipped by;
the learning rate; the optimizers' states; the parameters; the buffers; the loss and its weight. Before the first step: the weights that
it starts from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lockstep.verify.records import Mark, Marks, Trace
from lockstep.verify.yardstick import Yardstick, distance, pooled, tensor_distance

LIMIT = 10.0
"""A plan passes while its distance from the reference is at most this many times the twins'."""
SUM_LIMIT = 4.0
"""The reduced gradient may miss the float64 sum of the microbatches' by this many times what adding them in their own type costs."""
BEFORE = -1
"""The step of what is wrong before the first one."""

Check = Literal[
    "initial",
    "samples",
    "microbatch",
    "missing",
    "sum",
    "gradients",
    "ranks",
    "norm",
    "lr",
    "states",
    "parameters",
    "buffers",
    "loss",
    "weight",
]
ORDER: tuple[Check, ...] = (
    *("initial", "samples", "microbatch", "missing", "gradients", "sum", "norm", "lr", "states", "parameters", "buffers", "ranks"),
    *("loss", "weight"),
)
"""Which of several findings at one step comes first."""
SAID: Mapping[Check, str] = {
    "initial": "initial value",
    "samples": "other samples",
    "microbatch": "gradient of one microbatch",
    "missing": "gradient (there on one side only)",
    "gradients": "gradient",
    "sum": "sum of the microbatches' gradients",
    "norm": "norm that is clipped by",
    "lr": "learning rate",
    "states": "optimizer state",
    "parameters": "parameter",
    "buffers": "buffer",
    "ranks": "value on another rank",
    "loss": "loss",
    "weight": "weight of the loss",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that differs by more than it may."""

    step: int
    """-1: before the first."""
    check: Check
    name: str = ""
    """Of the tensor. Empty where it is not about one."""
    rank: int = 0
    ratio: float = math.inf
    """Its distance over its unit."""
    relative: float = math.inf
    """Its distance over the reference's norm."""
    microbatches: tuple[int, ...] = ()
    """Those involved; empty: all of the step."""


@dataclass(kw_only=True, slots=True)
class Comparison:
    """A plan's trace against the reference's."""

    plan: str
    steps: int
    bitwise: bool
    findings: list[Finding] = field(default_factory=list)
    """Those at the first step that has any, the first one first."""
    worst: Finding | None = None
    """The largest ratio of a gradient, state, parameter, buffer, norm or loss: how close it came."""
    curves: dict[str, list[float]] = field(default_factory=dict)
    """`gradients`, `parameters`, `loss`: at each step, the relative distance from the reference, tensors pooled."""
    remarks: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.findings


def compare(reference: Trace, plan: Trace, yardstick: Yardstick, *, bitwise: bool, limit: float = LIMIT) -> Comparison:
    """`bitwise`: every bit must be the reference's. `limit`: how many units it may be away where it need not be."""
    steps = min(reference.steps, plan.steps)
    comparison = Comparison(plan=plan.plan, steps=steps, bitwise=bitwise)
    _compare(_Side(reference, plan, yardstick, bitwise, limit, comparison), steps, _CHECKS)
    if plan.steps != reference.steps and comparison.passed:
        comparison.findings = [Finding(step=steps, check="samples")]
    comparison.curves = curves(reference, plan, steps)
    return comparison


def compare_compressed(exact: Trace, compressed: Trace) -> Comparison:
    """The same run with gradients sent in fewer bytes: what that may not change is compared, how far the rest is away is in `curves`."""
    steps = min(exact.steps, compressed.steps)
    comparison = Comparison(plan=compressed.plan, steps=steps, bitwise=False)
    _compare(_Side(exact, compressed, Yardstick(exact, []), False, LIMIT, comparison), steps, checks=(_samples, _missing, _ranks))
    comparison.curves = curves(exact, compressed, steps)
    return comparison


def curves(reference: Trace, other: Trace, steps: int) -> dict[str, list[float]]:
    """The relative distance of `other` at each step, tensors pooled; and of the loss."""
    found: dict[str, list[float]] = {"gradients": [], "parameters": [], "loss": []}
    for step in range(steps):
        ours, theirs = reference.first.steps[step], other.first.steps[step]
        for kind in ("gradients", "parameters"):
            marks = ours.tensors[kind]
            pairs = {name: (mark, theirs.tensors[kind].get(name)) for name, mark in marks.items()}
            found[kind].append(pooled([tensor_distance(reference, other, step, kind, *item) for item in pairs.items()], marks))
        found["loss"].append(abs(theirs.loss - ours.loss) / (abs(ours.loss) or 1.0))
    return found


@dataclass(slots=True)
class _Side:
    """What is compared with what."""

    reference: Trace
    plan: Trace
    yardstick: Yardstick
    bitwise: bool
    limit: float
    comparison: Comparison

    def judge(self, check: Check, *, step: int, away: float, unit: float, norm: float, **where: object) -> Iterator[Finding]:
        """A finding where `away` is more than it may be; noted where it is the closest so far to that."""
        if away == 0.0:
            return
        finding = Finding(step=step, check=check, ratio=away / unit, relative=away / norm if norm else math.inf, **where)  # type: ignore[arg-type]
        worst = self.comparison.worst
        if worst is None or finding.ratio > worst.ratio:
            self.comparison.worst = finding
        if self.bitwise or not finding.ratio <= self.limit:
            yield finding


def _compare(side: _Side, steps: int, checks: Sequence[Callable[[_Side, int], Iterator[Finding]]]) -> None:
    findings = list(_initial(side))
    for step in range(steps):
        if findings:
            break
        for check in checks:
            findings += check(side, step)
    places = {name: place for place, name in enumerate(side.reference.backward_order)}
    side.comparison.findings = sorted(
        findings, key=lambda f: (ORDER.index(f.check), places.get(f.name.partition("/")[0] if f.check == "states" else f.name, 0), f.rank)
    )


def _initial(side: _Side) -> Iterator[Finding]:
    """The weights that it starts from are the same bits on every rank, whatever the plan."""
    for rank, entry in side.plan.ranks.items():
        for kind in ("parameters", "buffers"):
            ours, theirs = side.reference.first.initial[kind], entry.initial[kind]
            for name in {**ours, **theirs}:
                away = distance(ours.get(name), theirs.get(name))
                if away:
                    norm = mark.norm if (mark := ours.get(name)) is not None else 0.0
                    yield Finding(step=BEFORE, check="initial", name=name, rank=rank, relative=away / norm if norm else math.inf)


def _samples(side: _Side, step: int) -> Iterator[Finding]:
    ours = {m.index: m.samples for m in side.reference.of_step(step)}
    taken = Counter(m.index for m in side.plan.of_step(step) if m.rank == _first_of(side.plan, step, m.index))
    theirs = {m.index: m.samples for m in side.plan.of_step(step)}
    twice = {index for index, times in taken.items() if times > 1}
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index) or index in twice:
            rank = next((m.rank for m in side.plan.of_step(step) if m.index == index), 0)
            yield Finding(step=step, check="samples", rank=rank, microbatches=(index,))


def _first_of(trace: Trace, step: int, index: int) -> int:
    """Ranks that share a layer or a stage all say the same of a microbatch; one of them counts, and where ranks are whole, all do."""
    return min(m.rank for m in trace.of_step(step) if m.index == index)


def _microbatches(side: _Side, step: int) -> Iterator[Finding]:
    """Bit for bit, while the parameters have the same bits: in fast numerics, in the first step."""
    if step and not side.bitwise:
        return
    ours = {m.index: m.gradients for m in side.reference.of_step(step)}
    differ = 0
    for microbatch in side.plan.of_step(step):
        expected, found = ours.get(microbatch.index), microbatch.gradients
        if expected is None or found is None:
            continue
        units: dict[str, float] = {}
        for name, mark in expected.items():
            away = distance(mark, found.get(name))
            if away == 0.0:
                continue
            differ += 1
            units = units or side.yardstick.microbatch_units(step, microbatch.index)
            where = {"name": name, "rank": microbatch.rank, "microbatches": (microbatch.index,)}
            norm = mark.norm if mark is not None else 0.0
            yield from side.judge("microbatch", step=step, away=away, unit=units.get(name, 1e-38), norm=norm, **where)
    alone = side.plan.facts.get("pairs", 1) == 1  # of several, one's forward may run another that the step has moved already
    if differ and alone and not side.bitwise and "compile=yes" not in side.plan.plan:
        side.comparison.remarks.append(
            f"step {step}: {differ} gradients of single microbatches have other bits than the reference's; expected are the same bits on "
            "one kind of machine with as many threads"
        )


def _missing(side: _Side, step: int) -> Iterator[Finding]:
    ours = side.reference.first.steps[step].tensors["gradients"]
    for rank, entry in side.plan.ranks.items():
        theirs = entry.steps[step].tensors["gradients"]
        for name in {**ours, **theirs}:
            if (ours.get(name) is None) != (theirs.get(name) is None):
                yield Finding(step=step, check="missing", name=name, rank=rank)


def _sums(side: _Side, step: int) -> Iterator[Finding]:
    """Each whole rank's reduced gradient against the sum, in float64, of all microbatches' own.

    In fast numerics a plan may scale the loss on its way (by 3, say), which rounds a gradient that nearly cancels quite otherwise: there it
    may miss the sum by what the twins miss one another by, too.
    """
    units = {} if side.bitwise else side.yardstick.units(step, "gradients")
    parts = [m for m in side.plan.of_step(step) if m.gradients is not None]
    if not parts or len(parts) < len(side.reference.of_step(step)):
        return
    for rank, entry in side.plan.ranks.items():
        gain = entry.steps[step].gain
        for name, mark in entry.steps[step].tensors["gradients"].items():
            leaves = [leaf for m in parts if m.gradients is not None and (leaf := m.gradients.get(name)) is not None]
            if mark is None or not leaves or math.isnan(mark.norm):
                continue
            away, unit = sum_error(mark, leaves, gain)
            unit = max(unit, units.get(name, 0.0))
            if not away <= SUM_LIMIT * unit:
                ratio = side.limit / SUM_LIMIT * away / unit if unit else math.inf  # so that a ratio above `limit` fails, as elsewhere
                yield Finding(step=step, check="sum", name=name, rank=rank, ratio=ratio, relative=away / (mark.norm or 1.0))


def sum_error(total: Mark, leaves: list[Mark], gain: float) -> tuple[float, float]:
    """How far a sum is from the float64 sum of its leaves times `gain`, and what rounding costs it: half a unit in the last place of
    each partial sum, which are as large as the leaves together at most, and their errors add up like a random walk."""
    expected = gain * np.sum([leaf.projection for leaf in leaves], axis=0)
    away = float(np.sqrt(np.mean((expected - total.projection) ** 2)))
    unit = 0.5 * total.eps * math.sqrt(len(leaves) + 2) * abs(gain) * sum(leaf.norm for leaf in leaves)
    return away, unit


def _tensors(side: _Side, step: int) -> Iterator[Finding]:
    ours = side.reference.first.steps[step].tensors
    for kind in ("gradients", "states", "parameters", "buffers"):
        units = side.yardstick.units(step, kind)
        for rank, entry in side.plan.ranks.items():
            theirs = entry.steps[step].tensors[kind]
            for name, mark in ours[kind].items():
                if kind == "gradients" and (mark is None) != (theirs.get(name) is None):
                    continue  # found missing already
                found = theirs.get(name)
                away = distance(mark, found) if rank else tensor_distance(side.reference, side.plan, step, kind, name, (mark, found))
                norm = mark.norm if mark is not None else 0.0
                unit = units.get(name, 1e-38)
                yield from side.judge(kind, step=step, away=away, unit=unit, norm=norm, name=name, rank=rank)


def _scalars(side: _Side, step: int) -> Iterator[Finding]:
    ours = side.reference.first.steps[step]
    for rank, entry in side.plan.ranks.items():
        theirs = entry.steps[step]
        if ours.norm is not None and theirs.norm is not None:
            away, unit = abs(theirs.norm - ours.norm), side.yardstick.scalar(step, "norm")
            yield from side.judge("norm", step=step, away=away, unit=unit, norm=ours.norm, rank=rank)
        away, unit = abs(theirs.loss - ours.loss), side.yardstick.scalar(step, "loss")
        if not (math.isnan(ours.loss) and math.isnan(theirs.loss)):
            yield from side.judge("loss", step=step, away=away, unit=unit, norm=abs(ours.loss), rank=rank)
        if ours.lr != theirs.lr:
            yield Finding(step=step, check="lr", rank=rank)
        if not math.isclose(ours.weight or 0.0, theirs.weight or 0.0, rel_tol=1e-6):
            yield Finding(step=step, check="weight", rank=rank)


def _ranks(side: _Side, step: int) -> Iterator[Finding]:
    """Ranks that each hold the whole model hold the same bits of it."""
    first = side.plan.first.steps[step].tensors
    for rank, entry in side.plan.ranks.items():
        for kind in ("gradients", "parameters", "buffers"):
            theirs: Marks = entry.steps[step].tensors[kind]
            for name, mark in first[kind].items():
                away = distance(mark, theirs.get(name))
                if rank and away:
                    norm = mark.norm if mark is not None else 0.0
                    yield Finding(step=step, check="ranks", name=name, rank=rank, relative=away / norm if norm else math.inf)


_CHECKS = (_samples, _microbatches, _missing, _sums, _tensors, _scalars, _ranks)
