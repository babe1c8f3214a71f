"""The cause of a balance loss that a rank computes from its own tokens' choices of experts."""

from __future__ import annotations

from lockstep.verify.causes.evidence import Evidence


def own_tokens(evidence: Evidence) -> str | None:
    """Check for ranks whose balance loss takes the load of experts from their own tokens: each
    differs from the reference's load, and together they make it."""
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
