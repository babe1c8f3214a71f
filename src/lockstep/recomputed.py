"""The microbatches that several ranks compute to compare them, and the ranks that differ. Pure
arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A microbatch whose gradient several ranks compute, to compare it."""

    microbatch: int
    ranks: tuple[int, ...]
    """First the rank to which it is assigned; then the rank that recomputes it; then, of three or
    more ranks, the one that decides between them."""


def recomputed(
    shares: Sequence[Sequence[int]], choose: Callable[[int], int]
) -> tuple[Recomputed, ...]:
    """Choose one microbatch of each rank that has any, and the ranks that recompute it.

    Each rank recomputes at most one, and decides about at most one. `shares`: the microbatches of
    each rank; there are at least two ranks. `choose`: (number of the choice) -> random integer.
    """
    ranks = len(shares)
    first = 1 + choose(0) % (ranks - 1)
    distances = [0, first, first % (ranks - 1) + 1][: min(ranks, 3)]
    return tuple(
        Recomputed(
            share[choose(1 + owner) % len(share)],
            tuple((owner + distance) % ranks for distance in distances),
        )
        for owner, share in enumerate(shares)
        if share
    )


def ranks_at_fault(
    votes: Sequence[tuple[Recomputed, Sequence[object]]],
) -> tuple[list[int], list[int]]:
    """Return the ranks that computed a wrong gradient, and the ranks of which one did if the votes
    do not say which. `votes`: each microbatch, with the gradient that each of its `ranks`
    computed, in any form that can be compared.

    Two ranks that agree are right, and a third one that differs from them is wrong.
    """
    wrong, unclear = set[int](), list[tuple[int, ...]]()
    for each, gradients in votes:
        agreed = [one for one in gradients if gradients.count(one) > 1]
        if agreed:
            pairs = zip(each.ranks, gradients, strict=True)
            wrong |= {rank for rank, one in pairs if one != agreed[0]}
        else:
            unclear.append(each.ranks)
    open_ = [ranks for ranks in unclear if wrong.isdisjoint(ranks)]
    return sorted(wrong), sorted({rank for ranks in open_ for rank in ranks})
