"""Detects ranks that compute wrong results: chooses microbatches whose gradients several ranks
compute, and finds the ranks whose results differ. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

Position = list[float]
"""A position in the order in which the ranks of a replica exchange tensors, which is the same for
all these ranks. Positions compare as sequences."""
RECEIVED, WITHIN, SENT = range(3)
"""The second number of a position (the first counts the parts into which a microbatch's computation
is divided): a rank receives tensors before it computes the part, exchanges tensors while it
computes it, or sends tensors afterwards."""
GRADIENT: Position = [math.inf]
"""The position that stands for the parameters' gradients, after all exchanges of tensors."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A microbatch whose gradient several ranks compute, so that their results can be compared."""

    microbatch: int
    ranks: tuple[int, ...]
    """The rank to which the microbatch is assigned; the rank that recomputes it; and, if there are
    at least three ranks, a third rank that decides between these two."""


def recomputed(
    shares: Sequence[Sequence[int]], choose: Callable[[int], int]
) -> tuple[Recomputed, ...]:
    """Choose, for each rank that has microbatches, one of its microbatches and the other ranks that
    recompute it. Each rank recomputes at most one microbatch as the second rank, and at most one as
    the third. `shares`: the microbatches of each of at least two ranks. `choose`: (number of the
    choice) -> random integer."""
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
    """Return the ranks that computed a wrong gradient, and ranks among which at least one did.
    `votes`: each microbatch, with the gradient that each of its `ranks` computed, in any form that
    can be compared. Two ranks that agree are right."""
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


class Computed(NamedTuple):
    """Checksums of a rank's results for one microbatch."""

    exchanged: Sequence[tuple[Position, int]]
    """(position, checksum) for each tensor that is exchanged with other ranks of the replica."""
    gradient: Sequence[int]
    """The checksum of each parameter's gradient."""

    def first_difference(self, other: Computed) -> Position | None:
        for pair in zip_longest(self.exchanged, other.exchanged):
            if pair[0] != pair[1]:
                return min(each[0] for each in pair if each is not None)
        return None if self.gradient == other.gradient else GRADIENT


class Reported(NamedTuple):
    """The results of one rank in a step in which ranks recompute each other's microbatches; or of
    several ranks, if these exchange tensors inside of layers."""

    ranks: Sequence[int]
    computed: Sequence[Computed]
    """Results by role, an index into `Recomputed.ranks`: 0 computed its own microbatch, 1
    recomputed another rank's, 2 decides."""


@dataclass(frozen=True, slots=True)
class WrongRanks:
    """The ranks that computed wrong results, and the microbatch in which this was detected."""

    ranks: Sequence[int]
    """If not `is_certain`, at least one of these ranks is wrong."""
    is_certain: bool
    microbatch: Recomputed
    role: int
    """Index in `microbatch.ranks` of one of the wrong `ranks`."""
    other: int
    """Index in `microbatch.ranks` of a rank with a different result."""
    position: Position
    """The first position at which the results of `role` and `other` differ."""
    has_third: bool
    """True if two data ranks agree on the microbatch, so that another one is wrong."""


def verdict(chosen: Sequence[Recomputed], replicas: Sequence[Sequence[Reported]]) -> WrongRanks:
    """Return the ranks that computed wrong results. A wrong result spreads to the other ranks of a
    replica when they exchange tensors, so the ranks whose results differ first are the wrong ones.
    `replicas`: for each replica of the model, the reports of its ranks, in the same order in every
    replica."""
    votes = [
        (
            each,
            [
                [reported.computed[role] for reported in replicas[data]]
                for role, data in enumerate(each.ranks)
            ],
        )
        for each in chosen
    ]
    wrong, unclear = ranks_at_fault(votes)
    ranks, is_shared = set[int](), False
    first: WrongRanks | None = None
    for each, values in votes:
        right = next((one for one in values if values.count(one) > 1), None)
        for role, other in _pairs(values, right):
            data = each.ranks[role]
            if data not in (wrong or unclear) or (wrong and right is None):
                continue
            position, places = _first_differences(values[role], values[other])
            named = [rank for place in places for rank in replicas[data][place].ranks]
            ranks.update(named)
            is_shared = is_shared or len(named) > 1 or position[1:2] == [RECEIVED]
            first = first or WrongRanks([], False, each, role, other, position, bool(wrong))
    assert first is not None, "at least one microbatch differs"
    return replace(first, ranks=sorted(ranks), is_certain=bool(wrong) and not is_shared)


def _pairs(values: Sequence[object], right: object | None) -> list[tuple[int, int]]:
    """Return the pairs of indices at which the values differ. `right`: the value that the second
    index of a pair must have; None: any."""
    roles = range(len(values))
    return [
        (one, other)
        for one in roles
        for other in roles
        if values[one] != values[other] and right in (None, values[other])
    ]


def _first_differences(
    one: Sequence[Computed], other: Sequence[Computed]
) -> tuple[Position, list[int]]:
    """Return the first position at which the results of two replicas differ, and the indices,
    within the replica, of the ranks whose results differ there."""
    positions = [mine.first_difference(theirs) for mine, theirs in zip(one, other, strict=True)]
    position = min(each for each in positions if each is not None)
    return position, [place for place, each in enumerate(positions) if each == position]
