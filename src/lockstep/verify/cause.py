"""What went wrong, where the numbers tell: each known fault leaves a pattern in the trace. Pure.

The strongest tool is a fit. The trace has each microbatch's own gradient, so a wrong sum can be asked of what it is a sum: β times what
each rank's microbatches add up to, plus what the step before left behind. Where the fit is exact, β is the fault: (1, 0) was not
reduced, (2, 2) has a wrong factor, and with Σ 1/β = number of ranks, ranks' means were averaged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.verify.compare import Finding
from lockstep.verify.records import Marks, Microbatch, Rank, Trace, Vector

EXACT = 1e-3
"""The residue of a fit that counts as none, relative. Rounding is far below it, a wrong explanation far above."""
ESTIMATE = 0.2
"""How far, relative, a norm that is estimated from projections may be from the one it is."""
PROJECTIONS = 8
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The first step at which something differs, and the findings there, the first one first."""

    reference: Trace
    plan: Trace
    findings: Sequence[Finding]

    @property
    def first(self) -> Finding:
        return self.findings[0]

    @property
    def step(self) -> int:
        return self.first.step

    def of(self, *checks: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.check in checks]

    def names(self, *checks: str) -> list[str]:
        """Of the tensors found, once each."""
        return list(dict.fromkeys(finding.name for finding in self.of(*checks)))


def likely_cause(evidence: Evidence) -> str | None:
    """The fault in words, with what it was seen by; None where no pattern fits."""
    for pattern in _PATTERNS[evidence.first.check]:
        if cause := pattern(evidence):
            return cause
    return None


def _initial(evidence: Evidence) -> str:
    ranks = sorted({finding.rank for finding in evidence.findings})
    if evidence.plan.world_size > 1 and len(evidence.plan.ranks) > 1 and 0 not in ranks:
        return (
            f"ranks {_listed(ranks)} did not start from rank 0's weights: they were drawn from another seed (one that depends on the "
            "rank), or not sent to all"
        )
    if len(evidence.findings) == 1:
        return "this tensor does not start from the reference's value: it was initialised elsewhere, in another order or from another seed"
    return (
        "other initial weights: another seed, or a model factory that draws on something other than the seeded generators (the rank, "
        "the clock, the number of processes)"
    )


def _samples(evidence: Evidence) -> str:
    ours = Counter(sample for m in evidence.reference.of_step(evidence.step) for sample in m.samples)
    theirs = Counter(sample for m in evidence.plan.of_step(evidence.step) for sample in m.samples)
    twice, left_out = theirs - ours, ours - theirs
    said = [f"sample {min(twice)} is seen twice" if min(twice) in ours else f"sample {min(twice)} is another step's"] if twice else []
    said += [f"sample {min(left_out)} is left out"] if left_out else []
    if said:
        more = sum(twice.values()) + sum(left_out.values()) - len(said)
        return ", ".join(said) + (f" (and {more} more)" if more > 0 else "")
    if evidence.plan.steps != evidence.reference.steps and not evidence.plan.of_step(evidence.step):
        return "the run ended after another number of steps"
    return "the same samples in another order or in other microbatches"


def _generators(evidence: Evidence) -> str | None:
    """Dropout masks: a microbatch's random stream is its own, whoever computes it."""
    ours = {m.index: m for m in evidence.reference.of_step(evidence.step)}
    expected = {index: microbatch.generator for index, microbatch in ours.items()}
    theirs = [m for m in evidence.plan.of_step(evidence.step) if m.drew and m.gradients is not None]
    wrong = [m for m in theirs if m.generator and expected.get(m.index) and m.generator != expected[m.index]]
    for microbatch in wrong:
        for other in theirs:
            if other.rank != microbatch.rank and other.generator == microbatch.generator:
                low, high = sorted((microbatch, other), key=lambda m: m.index)
                return (
                    f"the same dropout mask on several ranks: microbatch {high.index} on rank {high.rank} was computed from the random "
                    f"state of microbatch {low.index} on rank {low.rank}"
                )
    if wrong:
        return (
            f"another dropout mask: the random state before microbatch {wrong[0].index} on rank {wrong[0].rank} is not the reference's; it "
            "must depend on the seed, the step and the microbatch, never on the rank"
        )
    for microbatch in theirs:
        if microbatch.index in ours and microbatch.left != ours[microbatch.index].left:
            return (
                f"another dropout mask: microbatch {microbatch.index} on rank {microbatch.rank} starts from the right random state and "
                "leaves another than the reference's: the forward draws more or fewer numbers there, or seeds a generator itself"
            )
    return None


def _scaled_microbatches(evidence: Evidence) -> str | None:
    """Microbatches' gradients that are multiples of what they should be."""
    expected = {m.index: m for m in evidence.reference.of_step(evidence.step)}
    factors: dict[int, float] = {}
    names = evidence.names("microbatch")
    for microbatch in evidence.plan.of_step(evidence.step):
        factor = _multiple(expected.get(microbatch.index), microbatch, names)
        if factor is None:
            return None
        factors[microbatch.index] = factor
    if not factors:
        return None
    values = list(factors.values())
    if max(values) - min(values) <= EXACT * max(map(abs, values)):
        what = "every microbatch's gradient" + (f" of {_listed([repr(name) for name in names])}" if len(names) < 4 else "")
        return _factor(float(np.mean(values)), evidence.plan.world_size, what)
    inverse = sum(1 / value for value in values if value) / len(values)
    if all(value > 0 for value in values) and 0.5 < inverse < 2:
        return (
            "a mean of means: the microbatches' gradients are multiplied by "
            f"{_listed([f'{value:.4g}' for value in values])} of what they should be, so that each counts by its own or its rank's "
            "denominator and not by that of the whole batch"
        )
    return None


def _multiple(expected: Microbatch | None, found: Microbatch, names: list[str]) -> float | None:
    if expected is None or expected.gradients is None or found.gradients is None:
        return None
    return _ratio(_column(expected.gradients, names), _column(found.gradients, names))


_KEPT = "keeps something from one microbatch to the next (a counter, a cache, a hidden state)"


def _kept_something(evidence: Evidence) -> str | None:
    """Rank 0 begins as the reference does: where its first microbatch is right and a later one is not, it matters what came before."""
    wrong = {index for finding in evidence.of("microbatch") for index in finding.microbatches}
    rank_0 = [m.index for m in evidence.plan.of_step(evidence.step) if m.rank == 0]
    late = wrong.intersection(rank_0[1:])
    if not late or rank_0[0] in wrong:
        return None
    return (
        f"the model or the loss {_KEPT}: on rank 0 microbatch {rank_0[0]} is right, and microbatch {min(late)} is not, which comes behind "
        "others there than on one process; make each a function of its batch alone"
    )


def _batchnorm_microbatch(evidence: Evidence) -> str | None:
    if not evidence.reference.facts.get("batchnorm"):
        return None
    first = evidence.first
    return (
        f"BatchNorm statistics: microbatch {first.microbatches[0]} on rank {first.rank} has another gradient from the same samples and the "
        "same random state; it was normalised over other samples than its own, or in another mode"
    )


def _something_else(evidence: Evidence) -> str:
    first = evidence.first
    return (
        f"microbatch {first.microbatches[0]} has another gradient on rank {first.rank} from the same samples and the same random state: "
        "the data, the model or the loss looks at something that is not the same for all (the rank, the number of processes, the clock, a "
        f"generator of its own), or {_KEPT}"
    )


def _sum_of_what(evidence: Evidence) -> str | None:
    """Fit the gradients that are wrong by what the ranks' own microbatches add up to."""
    for names in (evidence.names("gradients", "sum"), evidence.names("gradients", "sum")[:1]):
        for rank in sorted({finding.rank for finding in evidence.of("gradients", "sum")}):
            if cause := _fit(evidence, names, rank):
                return cause
    return None


def _fit(evidence: Evidence, names: list[str], rank: int) -> str | None:
    entry = evidence.plan.ranks[rank]
    target = _column(entry.steps[evidence.step].tensors["gradients"], names)
    whole = names == [name for name, mark in entry.steps[evidence.step].tensors["gradients"].items() if mark is not None]
    what = "the gradient" if whole or len(names) > 3 else f"the gradient of {_listed([repr(name) for name in names])}"
    expected = _column(evidence.reference.first.steps[evidence.step].tensors["gradients"], names)
    factor = _ratio(expected, target)
    if factor is not None and abs(factor - 1) > EXACT:
        return _factor(factor, evidence.plan.world_size, what)
    if evidence.step:
        before = _column(evidence.plan.ranks[rank].steps[evidence.step - 1].tensors["gradients"], names)
        left = _ratio(before, target - expected)
        if left is not None:
            return f"{what} still holds {left:.3g} times that of the step before: it was not cleared between steps"
    sums = _sums_by_rank(evidence, names, entry.steps[evidence.step].gain)
    return _shares(evidence, sums, target, what, rank) or _single_microbatches(evidence, names, target, what, entry)


def _shares(evidence: Evidence, sums: dict[int, Vector], target: Vector, what: str, rank: int) -> str | None:
    """What multiple of each rank's own sum the target is."""
    ranks = [r for r in sums if np.any(sums[r])]
    shares = _least_squares([sums[r] for r in ranks], target)
    if shares is None or len(ranks) < 2 or all(abs(share - 1) <= EXACT for share in shares):
        return None
    one_hot = [r for r, share in zip(ranks, shares, strict=True) if abs(share) > EXACT]
    if len(one_hot) == 1:
        share = shares[ranks.index(one_hot[0])]
        times = "" if abs(share - 1) < EXACT else f", times {share:.4g}"
        mine = "its own microbatches" if one_hot[0] == rank else f"those of rank {one_hot[0]}"
        return f"{what} was not reduced: rank {rank} holds the sum over {mine} alone{times}"
    missing = [r for r, share in zip(ranks, shares, strict=True) if abs(share) <= EXACT]
    if missing:
        return f"{what} was not reduced over all ranks: what ranks {_listed(missing)} computed is left out on rank {rank}"
    if all(share > 0 for share in shares) and abs(sum(1 / share for share in shares) - len(shares)) < 0.01 * len(shares):
        return (
            f"a mean of means: rank by rank, {what} counts {_listed([f'{share:.4g}' for share in shares])} times what it should, as if "
            "each rank divided by its own weight and the results were averaged"
        )
    said = _listed([f"{share:.4g}" for share in shares])
    return f"a wrong weight for each rank: what ranks {_listed(ranks)} computed counts {said} times in {what}"


def _single_microbatches(evidence: Evidence, names: list[str], target: Vector, what: str, entry: Rank) -> str | None:
    """Where each rank's sum is taken, and some microbatch counts twice or not at all."""
    parts = [m for m in _parts(evidence) if m.gradients is not None]
    gain = entry.steps[evidence.step].gain
    columns = [gain * _column(m.gradients or {}, names) for m in parts]
    if len(columns) * 2 > len(target):
        return None
    shares = _least_squares(columns, target)
    if shares is None:
        return None
    odd = [(m, share) for m, share in zip(parts, shares, strict=True) if abs(share - 1) > EXACT]
    if len(odd) > len(parts) / 2:
        return None
    said = [
        f"microbatch {m.index} (rank {m.rank}) "
        + ("is left out" if abs(share) < EXACT else "is counted twice" if abs(share - 2) < EXACT else f"is counted {share:.4g} times")
        for m, share in odd
    ]
    return f"{', '.join(said)} in {what}" if said else None


def _parts(evidence: Evidence) -> list[Microbatch]:
    """Microbatches with gradients of their own: the plan's where it has them, else the reference's."""
    mine = evidence.plan.of_step(evidence.step)
    return mine if any(m.gradients is not None for m in mine) else evidence.reference.of_step(evidence.step)


def _sums_by_rank(evidence: Evidence, names: list[str], gain: float) -> dict[int, Vector]:
    owners = {m.index: m.rank for m in evidence.plan.of_step(evidence.step)}
    sums: dict[int, Vector] = {}
    for microbatch in _parts(evidence):
        rank = owners.get(microbatch.index, 0)
        if microbatch.gradients is not None:
            sums[rank] = sums.get(rank, 0.0) + gain * _column(microbatch.gradients, names)
    return sums


def _few_elements(evidence: Evidence) -> str | None:
    """Where the tensors themselves are there: only some of its elements are wrong."""
    first = evidence.first
    pair = _tensors(evidence)
    if pair is None:
        return None
    ours, theirs = pair
    apart = np.abs(theirs - ours)
    wrong = np.flatnonzero(apart > 0.01 * apart.max())
    if len(wrong) > len(ours) / 4:
        return None
    place = int(wrong[0])
    return (
        f"{len(wrong)} of the {len(ours)} elements of {first.name!r} are wrong, the first at number {place} (row-major): "
        f"{theirs[place]:.6g} where the reference has {ours[place]:.6g}; as at the edge of a shard, of a padding or of a bucket"
    )


def _short_type(evidence: Evidence) -> str | None:
    """Numbers that all fit into a shorter type were rounded to it."""
    first = evidence.first
    pair = _tensors(evidence)
    if pair is None or not np.any(pair[1]):
        return None
    ours, theirs = pair
    for name, fits in _FITS.items():
        if fits(theirs) and not fits(ours):
            return (
                f"every element of the gradient of {first.name!r} is a {name} number, and the reference's are not: it was summed or sent so"
            )
    return None


def _tensors(evidence: Evidence) -> tuple[Vector, Vector] | None:
    """Of the first finding: the reference's tensor and the plan's, where both traces have them."""
    first = evidence.first
    if first.rank or first.check not in ("gradients", "parameters"):
        return None
    ours = evidence.reference.tensor(first.step, first.check, first.name)
    theirs = evidence.plan.tensor(first.step, first.check, first.name)
    return (ours, theirs) if ours is not None and theirs is not None and ours.shape == theirs.shape else None


def _is_bfloat16(x: Vector) -> bool:
    short = x.astype(np.float32)
    return bool(np.all(short == x) and np.all(short.view(np.uint32) & 0xFFFF == 0))


_FITS: dict[str, Callable[[Vector], bool]] = {
    "bfloat16": _is_bfloat16,
    "float16": lambda x: bool(np.all(x.astype(np.float16) == x)),
    "float32": lambda x: bool(np.all(x.astype(np.float32) == x)),
}


def _missing(evidence: Evidence) -> str:
    name, step = evidence.first.name, evidence.step
    ours = evidence.reference.first.steps[step].tensors["gradients"].get(name)
    if ours is None:
        return (
            f"nobody used {name!r} in this step, and it has a gradient (of zeros, say): the optimizer decays it and its momentum moves it"
        )
    users = sorted({m.rank for m in evidence.plan.of_step(step) if m.gradients is not None and m.gradients.get(name) is not None})
    if users and evidence.first.rank not in users:
        return f"the gradient of {name!r} was not reduced: ranks {_listed(users)} used it, rank {evidence.first.rank} did not and got none"
    return f"the gradient of {name!r} is lost: some microbatches used it"


def _clipping(evidence: Evidence) -> str:
    """The norm is compared with that of the gradients in the trace, which are right."""
    finding = evidence.first
    entry = evidence.plan.ranks[finding.rank].steps[finding.step]
    marks = [mark for mark in entry.tensors["gradients"].values() if mark is not None]
    whole = math.sqrt(sum(mark.norm**2 for mark in marks))
    norm = entry.norm or 0.0
    said = f"rank {finding.rank} clips by {norm:.6g} where the norm of the whole gradient is {whole:.6g}"
    names = [name for name, mark in entry.tensors["gradients"].items() if mark is not None]
    own = _sums_by_rank(evidence, names, entry.gain).get(finding.rank)
    if own is not None and abs(float(np.linalg.norm(own)) / math.sqrt(PROJECTIONS) - norm) < ESTIMATE * norm:
        return f"a local clipping norm: {said}; it is about that of what the rank computed itself, before the reduction"
    if norm < whole:
        return f"a local clipping norm: {said}; the norm was taken over a part of the gradient (a shard, a stage) and not summed over ranks"
    return f"a wrong clipping norm: {said}; parts of the gradient were counted more than once, or before they were scaled"


def _learning_rate(evidence: Evidence) -> str:
    step, rank = evidence.step, evidence.first.rank
    ours = [entry.lr for entry in evidence.reference.first.steps]
    found = evidence.plan.ranks[rank].steps[step].lr
    if found in ours:
        return f"the learning rate {found:.6g} is that of step {ours.index(found)}: the schedule was stepped too often, or too seldom"
    return f"another learning rate: {found} where the reference has {ours[step]}"


def _update(evidence: Evidence) -> str | None:
    """The gradient is right and the parameter is not."""
    first = evidence.first
    names = evidence.names("parameters")
    ours, theirs = _moved(evidence.reference.first, first.step, names), _moved(evidence.plan.ranks[first.rank], first.step, names)
    if not np.any(theirs):
        return f"the update was not applied on rank {first.rank}: the gradient is right and {first.name!r} did not move"
    factor = _ratio(ours, theirs)
    if factor is not None and abs(factor - 1) > EXACT:
        return (
            f"the gradient is right and the update is {factor:.4g} times the reference's: another learning rate, or clipped by another norm"
        )
    optimizer = "its state is right too: other settings (weight decay, betas), or an optimizer that is not the same on a part of a tensor"
    return f"the gradient is right and the update is not; {optimizer}"


def _state(evidence: Evidence) -> str:
    first = evidence.first
    before = evidence.step and "the states were equal until then"
    return (
        f"the optimizer's state {first.name!r} differs while the gradient is right"
        + (f"; {before}" if before else "")
        + ": it was reset, loaded from elsewhere, or updated by a gradient that was not this one"
    )


def _buffer(evidence: Evidence) -> str:
    first = evidence.first
    who = "every rank" if len({f.rank for f in evidence.of("buffers")}) == len(evidence.plan.ranks) > 1 else f"rank {first.rank}"
    if first.name.rpartition(".")[2] in STATISTICS:
        return (
            f"BatchNorm statistics out of step: {who} has other running statistics than those of all microbatches in their order; "
            "they were updated from its own microbatches alone, or averaged"
        )
    return (
        f"a buffer out of step: {first.name!r} on {who} was changed by what that rank computed, and not by all microbatches in their order"
    )


def _disagreement(evidence: Evidence) -> str:
    first = evidence.first
    said = f"ranks 0 and {first.rank} hold different values of {first.name!r}, each within rounding of the reference"
    one, other = (evidence.plan.ranks[rank].steps[first.step].tensors["gradients"].get(first.name) for rank in (0, first.rank))
    if one is not None and other is not None and one.sha == other.sha:
        return f"{said}, from the same gradient: one was updated by other settings of the optimizer, or apart from the others"
    return f"{said}: the reduction does not give every rank the same bits"


def _loss(evidence: Evidence) -> str:
    first = evidence.first
    return (
        f"the gradient is right and the loss that rank {first.rank} records is not: it is that of its own microbatches, or a mean of means"
    )


def _weight(evidence: Evidence) -> str:
    return "the weight is not that of the whole global batch: it was not summed over ranks"


Pattern = Callable[[Evidence], str | None]
_PATTERNS: dict[str, tuple[Pattern, ...]] = {
    "initial": (_initial,),
    "samples": (_samples,),
    "microbatch": (_generators, _scaled_microbatches, _kept_something, _batchnorm_microbatch, _something_else),
    "missing": (_missing,),
    "gradients": (_sum_of_what, _generators, _short_type, _few_elements),
    "sum": (_sum_of_what,),
    "norm": (_clipping,),
    "lr": (_learning_rate,),
    "states": (_state,),
    "parameters": (_update,),
    "buffers": (_buffer,),
    "ranks": (_disagreement,),
    "loss": (_loss,),
    "weight": (_weight,),
}


def _factor(factor: float, world_size: int, what: str) -> str:
    said = f"a wrong factor: {what} is {factor:.4g} times what it should be"
    for power, words in ((-1, "divided by the number of processes once too often"), (1, "multiplied by the number of processes")):
        if abs(factor - float(world_size) ** power) < EXACT * max(1.0, factor) and world_size > 1:
            return f"{said}, {words}"
    return said


def _moved(rank: Rank, step: int, names: list[str]) -> Vector:
    before = rank.steps[step - 1].tensors["parameters"] if step else rank.initial["parameters"]
    moved: Vector = _column(rank.steps[step].tensors["parameters"], names) - _column(before, names)
    return moved


def _column(marks: Marks, names: list[str]) -> Vector:
    """The projections of these tensors, one after another; zeros for one that is not there."""
    found = [marks.get(name) for name in names]
    if not found:
        return np.zeros(0)
    return np.concatenate([np.zeros(PROJECTIONS) if mark is None else mark.projection for mark in found])


def _ratio(base: Vector, value: Vector) -> float | None:
    """f where value = f · base, or None."""
    square = float(base @ base)
    if not square or not np.all(np.isfinite(value)) or not np.any(value):
        return None
    factor = float(base @ value) / square
    return factor if np.linalg.norm(value - factor * base) <= EXACT * np.linalg.norm(value) else None


def _least_squares(columns: list[Vector], target: Vector) -> list[float] | None:
    """The multiples of the columns that add up to the target, or None."""
    if not columns or len(columns) >= len(target) or not np.all(np.isfinite(target)):
        return None
    matrix = np.stack(columns, axis=1)
    solution, _, rank, _ = np.linalg.lstsq(matrix, target, rcond=None)
    if rank < len(columns) or np.linalg.norm(matrix @ solution - target) > EXACT * np.linalg.norm(target):
        return None
    return [float(value) for value in solution]


def _listed(items: Sequence[object]) -> str:
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
