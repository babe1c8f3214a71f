"""Causes of a wrong balance loss of experts."""

from __future__ import annotations

from lockstep.evidence.tensors import EXACT
from lockstep.verify.causes.evidence import Evidence


def own_tokens(evidence: Evidence) -> str | None:
    """Find ranks whose balance loss uses only their own tokens. The load of each rank differs from
    the reference, but the sum over ranks is right."""
    for microbatch in evidence.microbatches:
        expected = evidence.expected_microbatches.get(microbatch.index)
        for layer, counts in microbatch.loads.items():
            right = () if expected is None else expected.loads.get(layer, ())
            if counts == right or len(counts) != len(right):
                continue
            of_ranks = {
                each.rank: each.loads[layer]
                for each in evidence.microbatches
                if layer in each.loads
                and (not microbatch.together or each.index == microbatch.index)
            }
            summed = tuple(map(sum, zip(*of_ranks.values(), strict=True)))
            if summed == right:
                return (
                    f"balance of a rank's own tokens: in microbatch {microbatch.index} on rank"
                    f" {microbatch.rank} the balance loss of {layer!r} takes the load of experts"
                    f" from {sum(counts)} choices, and the reference from {sum(right)}; those of"
                    f" ranks {min(of_ranks)} to {max(of_ranks)} together are the reference's; sum"
                    " the counts over the ranks before the loss"
                )
    return None


def scaled_term(evidence: Evidence) -> str | None:
    """Find a term of the loss that is multiplied or divided by the number of ranks."""
    ours, theirs = (
        trace.rank_0.steps[evidence.step].terms for trace in (evidence.reference, evidence.plan)
    )
    ratios = {
        name: theirs[name] / value for name, value in ours.items() if value and name in theirs
    }
    wrong = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > EXACT}
    if len(wrong) != 1 or len(ratios) < 2:
        return None
    ((name, ratio),) = wrong.items()
    size = evidence.plan.world_size
    for factor, what in ((1 / size, "shrinks"), (float(size), "grows")):
        if abs(ratio / factor - 1) < EXACT:
            return (
                f"a term of the loss that {what} with the ranks: {name!r} is {ratio:.4g} times the"
                f" reference's on {size} ranks, and the other terms are right; each rank's part is"
                " over the weight of the whole batch already: do not divide or multiply it by ranks"
            )
    return None
