"""Detects ranks that compute wrong results. Chooses microbatches whose gradients several ranks
compute, and finds the ranks whose results differ. The module does only arithmetic, and no
communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

Position = list[float]
"""A position in the order in which the ranks of a replica exchange tensors. All ranks of a replica
have the same order. Lists of numbers compare element by element."""
RECEIVED, WITHIN, SENT = range(3)
"""The second number of a `Position`. The first number counts the parts of a microbatch's
computation. `RECEIVED` tensors arrive before the part's computation, `WITHIN` tensors are exchanged
during the computation, and `SENT` tensors are sent afterwards."""
GRADIENT: Position = [math.inf]
"""The position of the parameters' gradients, after all exchanges of tensors."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A microbatch whose gradient several ranks compute, to compare their results."""

    microbatch: int
    ranks: tuple[int, ...]
    """The rank that has the microbatch, and the rank that recomputes the microbatch. With three or
    more ranks, a third rank also recomputes the microbatch, to find the wrong rank."""


def recomputed(
    shares: Sequence[Sequence[int]], choose: Callable[[int], int]
) -> tuple[Recomputed, ...]:
    """Choose one microbatch of each rank, and the ranks that recompute it. Each rank recomputes at
    most one microbatch as the second rank, and at most one as the third rank. `shares` has the
    microbatches of each of at least two ranks."""
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
    `votes` has each microbatch, with the gradient that each of its `ranks` computed, in any form
    that can be compared. Two ranks with equal gradients count as right."""
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
    """(position, checksum) for each tensor that the rank exchanges with ranks of its replica."""
    gradient: Sequence[int]
    """The checksum of each parameter's gradient."""

    def first_difference(self, other: Computed) -> Position | None:
        for pair in zip_longest(self.exchanged, other.exchanged):
            if pair[0] != pair[1]:
                return min(each[0] for each in pair if each is not None)
        return None if self.gradient == other.gradient else GRADIENT


class Reported(NamedTuple):
    """The results of one rank in a step in which ranks recompute microbatches. Includes the results
    of the ranks that exchange tensors with this rank in a layer."""

    ranks: Sequence[int]
    computed: Sequence[Computed]
    """The results, in the order of `Recomputed.ranks`. Role 0 computed the microbatch that is
    assigned to it, role 1 recomputed it, and role 2 decides."""


@dataclass(frozen=True, slots=True)
class WrongRanks:
    """The ranks that computed wrong results, and the microbatch in which this was detected."""

    ranks: Sequence[int]
    """The wrong ranks. If `is_certain` is False, at least one rank in `ranks` is wrong."""
    is_certain: bool
    microbatch: Recomputed
    role: int
    other: int
    position: Position
    """The first position at which the results of `role` and `other` differ."""
    has_third: bool
    """True if two data ranks agree on the microbatch. If `has_third` is True, the third rank is
    wrong."""


def verdict(chosen: Sequence[Recomputed], replicas: Sequence[Sequence[Reported]]) -> WrongRanks:
    """Return the ranks that computed wrong results. When the ranks of a replica exchange tensors, a
    wrong result spreads. The wrong ranks are the ranks whose results differ first. `replicas` has
    the reports of each replica's ranks, in the same order in every replica."""
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
    positions = [mine.first_difference(theirs) for mine, theirs in zip(one, other, strict=True)]
    position = min(each for each in positions if each is not None)
    return position, [place for place, each in enumerate(positions) if each == position]
