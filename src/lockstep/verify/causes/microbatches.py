"""Causes that are visible before gradients are reduced: initial weights, samples, random state,
single microbatches."""

from __future__ import annotations

from collections import Counter

import numpy as np

from lockstep.base.words import enumerated
from lockstep.evidence.tensors import EXACT, exact_ratio
from lockstep.evidence.trace import MicrobatchTrace
from lockstep.verify.causes.evidence import Evidence, stacked, wrong_factor

OTHER_DATA = (
    "the script makes its dataset from something that is not the same in every process, such as a"
    " generator that nobody seeds, an unsorted list of files, the rank or the clock; make the same"
    " data in every process and in every run"
)
_KEEPS_STATE = "keeps state from one microbatch to the next (a counter, a cache, a hidden state)"


def initial_weights(evidence: Evidence) -> str:
    ranks = sorted({difference.rank for difference in evidence.differences})
    if evidence.plan.world_size > 1 and len(evidence.plan.ranks) > 1 and 0 not in ranks:
        return (
            f"ranks {enumerated(ranks)} did not start from rank 0's weights: the weights were drawn"
            " from another seed (one that depends on the rank), or not broadcast to all ranks"
        )
    if len(evidence.differences) == 1:
        return (
            "this tensor does not start from the reference's value: it was initialized elsewhere,"
            " in another order or from another seed"
        )
    return (
        "different initial weights: another seed, or a model factory that draws from something"
        " other than the seeded generators (the rank, the clock, the world size)"
    )


def samples(evidence: Evidence) -> str:
    ours = evidence.expected_microbatches.values()
    expected = Counter(sample for m in ours for sample in m.samples)
    counts = Counter(sample for m in evidence.microbatches for sample in m.samples)
    extra, missing = counts - expected, expected - counts
    parts = []
    if extra:
        what = "seen twice" if min(extra) in expected else "another step's"
        parts.append(f"sample {min(extra)} is {what}")
    if missing:
        parts.append(f"sample {min(missing)} is missing")
    if parts:
        more = extra.total() + missing.total() - len(parts)
        return ", ".join(parts) + (f" (and {more} more)" if more > 0 else "")
    if evidence.plan.steps != evidence.reference.steps and not evidence.microbatches:
        return "the run ended after another number of steps"
    return "the same samples in another order or in other microbatches"


def other_data(evidence: Evidence) -> str:
    samples = evidence.expected_microbatches[evidence.first.microbatches[0]].samples[:4]
    return f"other data for the same samples ({enumerated(list(samples))}, ...): {OTHER_DATA}"


def random_state(evidence: Evidence) -> str | None:
    expected = evidence.expected_microbatches
    found = [m for m in evidence.microbatches if m.drew_random_numbers and m.gradients is not None]
    right_state = {index: microbatch.rng_before for index, microbatch in expected.items()}
    wrong = [
        m
        for m in found
        if m.rng_before and right_state.get(m.index) and m.rng_before != right_state[m.index]
    ]
    for microbatch in wrong:
        for other in found:
            if other.rank != microbatch.rank and other.rng_before == microbatch.rng_before:
                low, high = sorted((microbatch, other), key=lambda m: m.index)
                return (
                    f"the same dropout mask on several ranks: microbatch {high.index} on rank"
                    f" {high.rank} was computed from the random state of microbatch {low.index} on"
                    f" rank {low.rank}"
                )
    if wrong:
        return (
            f"another dropout mask: the random state before microbatch {wrong[0].index} on rank"
            f" {wrong[0].rank} is not the reference's; it must depend on the seed, the step and the"
            " microbatch, never on the rank"
        )
    for m in found:
        if m.index in expected and m.rng_after != expected[m.index].rng_after:
            return (
                f"another dropout mask: microbatch {m.index} on rank {m.rank}"
                " starts from the right random state but ends in another state than the"
                " reference's: the forward draws more or fewer random numbers there, or seeds a"
                " generator itself"
            )
    return None


def scaled_microbatches(evidence: Evidence) -> str | None:
    names = evidence.names("microbatch")
    expected = evidence.expected_microbatches
    microbatches = evidence.plan.whole_microbatches_of(evidence.step)
    factors = [_factor(expected.get(m.index), m, names) for m in microbatches]
    values = [factor for factor in factors if factor is not None]
    if not values or len(values) < len(factors):
        return None
    if all(abs(value - 1) <= EXACT for value in values):
        return None
    if max(values) - min(values) <= EXACT * max(map(abs, values)):
        what = "every microbatch's gradient"
        what += f" of {enumerated([repr(name) for name in names])}" if len(names) < 4 else ""
        return wrong_factor(float(np.mean(values)), evidence, what)
    inverse = sum(1 / value for value in values if value) / len(values)
    if all(value > 0 for value in values) and 0.5 < inverse < 2:
        return (
            "a mean of means: the microbatches' gradients are"
            f" {enumerated([f'{value:.4g}' for value in values])} times what they should be, as if"
            " each was divided by its own or its rank's weight instead of the weight of the whole"
            " batch"
        )
    return None


def _factor(
    expected: MicrobatchTrace | None, found: MicrobatchTrace, names: list[str]
) -> float | None:
    if expected is None or expected.gradients is None or found.gradients is None:
        return None
    return exact_ratio(stacked(expected.gradients, names), stacked(found.gradients, names))


def kept_state(evidence: Evidence) -> str | None:
    """Find state that the model keeps between microbatches. State is the cause if rank 0's first
    microbatch is right and a later microbatch is wrong."""
    wrong = {index for difference in evidence.of("microbatch") for index in difference.microbatches}
    rank_0 = [m.index for m in evidence.microbatches if m.rank == 0]
    late = wrong.intersection(rank_0[1:])
    if not late or rank_0[0] in wrong:
        return None
    return (
        f"the model or the loss {_KEEPS_STATE}: on rank 0 microbatch {rank_0[0]} is right and"
        f" microbatch {min(late)} is not, which follows other microbatches there than on one"
        " process; make the model and the loss functions of the batch alone"
    )


def batchnorm_of_microbatch(evidence: Evidence) -> str | None:
    if not evidence.reference.metadata.get("batchnorm"):
        return None
    first = evidence.first
    return (
        f"BatchNorm statistics: microbatch {first.microbatches[0]} on rank {first.rank} has another"
        " gradient from the same samples and the same random state; it was normalized over other"
        f" samples than its own, or in another mode; or the model or the loss {_KEEPS_STATE}"
    )


def other_input(evidence: Evidence) -> str:
    first = evidence.first
    return (
        f"microbatch {first.microbatches[0]} has another gradient on rank {first.rank} from the"
        " same samples and the same random state: the data, the model or the loss depends on"
        " something that is not the same on all ranks (the rank, the world size, the clock, a"
        f" generator of its own), or {_KEEPS_STATE}"
    )
