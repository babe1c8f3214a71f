"""Causes of a wrong reduced gradient.

The gradient is fitted by β times the gradient of each rank, plus the gradient of the previous step.
An exact fit names the fault: β = (1, 0) is a missing reduction, and β = (2, 2) a wrong factor. If
the sum of 1/β is the number of ranks, the gradient is a mean of means.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lockstep.base.words import enumerated
from lockstep.evidence.tensors import EXACT, Vector, exact_factors, exact_ratio
from lockstep.evidence.trace import MicrobatchTrace, RankTrace
from lockstep.verify.causes.evidence import Evidence, stacked, wrong_factor


def wrong_sum(evidence: Evidence) -> str | None:
    for names in (evidence.names("gradients", "sum"), evidence.names("gradients", "sum")[:1]):
        for rank in sorted({difference.rank for difference in evidence.of("gradients", "sum")}):
            if cause := _fit(evidence, names, rank):
                return cause
    return None


def _fit(evidence: Evidence, names: list[str], rank: int) -> str | None:
    entry = evidence.plan.ranks[rank]
    gradients = entry.steps[evidence.step].tensors["gradients"]
    target = stacked(gradients, names)
    all_differ = names == [name for name, summary in gradients.items() if summary is not None]
    what = "the gradient"
    if not all_differ and len(names) <= 3:
        what += f" of {enumerated([repr(name) for name in names])}"
    expected = stacked(evidence.reference.rank_0.steps[evidence.step].tensors["gradients"], names)
    factor = exact_ratio(expected, target)
    if factor is not None and abs(factor - 1) > EXACT:
        return wrong_factor(factor, evidence, what)
    if evidence.step:
        before = stacked(entry.steps[evidence.step - 1].tensors["gradients"], names)
        if (left_over := exact_ratio(before, target - expected)) is not None:
            return (
                f"{what} still holds {left_over:.3g} times the gradient of the step before: it was"
                " not cleared between steps"
            )
    sums = sums_by_rank(evidence, names, entry.steps[evidence.step].gain)
    together = {frozenset(m.together) for m in evidence.microbatches if m.together}
    return _ranks_miscounted(sums, target, what, rank, together) or _microbatches_miscounted(
        evidence, names, target, what, entry
    )


def _ranks_miscounted(
    sums: dict[int, Vector],
    target: Vector,
    what: str,
    rank: int,
    together: set[frozenset[int]],
) -> str | None:
    """Fit a wrong reduced gradient by the sum of each rank over its microbatches. `together` has
    the ranks that share the tokens of a sequence."""
    ranks = [r for r in sums if np.any(sums[r])]
    factors = exact_factors([sums[r] for r in ranks], target)
    if factors is None or len(ranks) < 2 or all(abs(factor - 1) <= EXACT for factor in factors):
        return None
    present = [r for r, factor in zip(ranks, factors, strict=True) if abs(factor) > EXACT]
    missing = [r for r, factor in zip(ranks, factors, strict=True) if abs(factor) <= EXACT]
    if missing and together and all(len(each.intersection(present)) == 1 for each in together):
        return (
            f"{what} was not summed over context: rank {rank} holds the gradient of its own part of"
            f" the sequences alone; what ranks"
            f" {enumerated(missing)} computed is missing"
        )
    if len(present) == 1:
        factor = factors[ranks.index(present[0])]
        times = "" if abs(factor - 1) < EXACT else f", times {factor:.4g}"
        owner = "its own" if present[0] == rank else f"rank {present[0]}'s"
        return (
            f"{what} was not reduced: rank {rank} holds the sum over {owner} microbatches"
            f" alone{times}"
        )
    if missing:
        return (
            f"{what} was not reduced over all ranks: on rank {rank} the gradients of ranks"
            f" {enumerated(missing)} are missing"
        )
    factors_text = enumerated([f"{factor:.4g}" for factor in factors])
    inverse = sum(1 / factor for factor in factors) / len(factors)
    if all(factor > 0 for factor in factors) and abs(inverse - 1) < 0.01:
        return (
            f"a mean of means: in {what} the ranks' sums count {factors_text} times instead of"
            " once, as if each rank divided by its own weight and the results were averaged"
        )
    return (
        f"a wrong weight for each rank: in {what} the sums of ranks {enumerated(ranks)} count"
        f" {factors_text} times"
    )


def _microbatches_miscounted(
    evidence: Evidence, names: list[str], target: Vector, what: str, entry: RankTrace
) -> str | None:
    """Fit a wrong reduced gradient by the gradients of single microbatches. A microbatch may count
    twice or not at all."""
    parts = _microbatches_with_gradients(evidence)
    gain = entry.steps[evidence.step].gain
    columns = [gain * stacked(m.gradients or {}, names) for m in parts]
    if len(columns) * 2 > len(target):
        return None
    if (factors := exact_factors(columns, target)) is None:
        return None
    pairs = zip(parts, factors, strict=True)
    wrong = [(m, factor) for m, factor in pairs if abs(factor - 1) > EXACT]
    if len(wrong) > len(parts) / 2:
        return None
    texts = [f"microbatch {m.index} (rank {m.rank}) {_counted(factor)}" for m, factor in wrong]
    return f"{', '.join(texts)} in {what}" if texts else None


def _counted(factor: float) -> str:
    if abs(factor) < EXACT:
        return "is missing"
    return "is counted twice" if abs(factor - 2) < EXACT else f"is counted {factor:.4g} times"


def _microbatches_with_gradients(evidence: Evidence) -> list[MicrobatchTrace]:
    own = [m for m in evidence.microbatches if m.gradients is not None]
    return own or [m for m in evidence.expected_microbatches.values() if m.gradients is not None]


def sums_by_rank(evidence: Evidence, names: list[str], gain: float) -> dict[int, Vector]:
    owners = {m.index: m.rank for m in evidence.microbatches}
    is_own = any(m.gradients is not None for m in evidence.microbatches)
    sums: dict[int, Vector] = {}
    for microbatch in _microbatches_with_gradients(evidence):
        rank = microbatch.rank if is_own else owners.get(microbatch.index, 0)
        sums[rank] = sums.get(rank, 0.0) + gain * stacked(microbatch.gradients or {}, names)
    return sums


def missing_gradient(evidence: Evidence) -> str:
    name, rank = evidence.first.name, evidence.first.rank
    expected = evidence.reference.rank_0.steps[evidence.step].tensors["gradients"].get(name)
    if expected is None:
        return (
            f"no microbatch used {name!r} in this step, but it has a gradient (of zeros, say): the"
            " optimizer decays the parameter, and its momentum moves it"
        )
    users = sorted({m.rank for m in evidence.microbatches if (m.gradients or {}).get(name)})
    if users and rank not in users:
        return (
            f"the gradient of {name!r} was not reduced: ranks {enumerated(users)} used it, rank"
            f" {rank} did not and got no gradient"
        )
    return f"the gradient of {name!r} is lost: some microbatches used it"


def few_elements(evidence: Evidence) -> str | None:
    if (tensors := _tensors(evidence)) is None:
        return None
    expected, actual = tensors
    errors = np.abs(actual - expected)
    wrong = np.flatnonzero(errors > 0.01 * errors.max())
    if len(wrong) > len(expected) / 4:
        return None
    first = int(wrong[0])
    return (
        f"{len(wrong)} of the {len(expected)} elements of {evidence.first.name!r} are wrong, the"
        f" first at index {first} (row-major): {actual[first]:.6g} instead of"
        f" {expected[first]:.6g}; look at the edges of shards, padding and buckets"
    )


def short_dtype(evidence: Evidence) -> str | None:
    tensors = _tensors(evidence)
    if tensors is None or not np.any(tensors[1]):
        return None
    expected, actual = tensors
    for dtype, fits in _FITS.items():
        if fits(actual) and not fits(expected):
            return (
                f"every element of the gradient of {evidence.first.name!r} is a {dtype} number, and"
                f" the reference's are not: the gradient was summed or sent in {dtype}"
            )
    return None


def _tensors(evidence: Evidence) -> tuple[Vector, Vector] | None:
    first = evidence.first
    if first.rank or first.check not in ("gradients", "parameters"):
        return None
    return evidence.tensors(first.check, first.name)


def _is_bfloat16(x: Vector) -> bool:
    short = x.astype(np.float32)
    return bool(np.all(short == x) and np.all(short.view(np.uint32) & 0xFFFF == 0))


_FITS: dict[str, Callable[[Vector], bool]] = {
    "bfloat16": _is_bfloat16,
    "float16": lambda x: bool(np.all(x.astype(np.float16) == x)),
    "float32": lambda x: bool(np.all(x.astype(np.float32) == x)),
}
