"""Compares the counts of tokens that a model's forward reads into Python, such as `chosen.any()`
and `len(rows)`. Ranks that divide a sequence's tokens read different counts. Different counts are
correct for code that skips an expert without tokens. Different counts are wrong for `if rare.any():
x = 2 * x`. Only results show the wrong use of a count, so some tokens are computed both on one rank
and divided among ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lockstep.base.nested import tensors_in
from lockstep.comm.world import World
from lockstep.model.context.chunk_axis import ChunkAxis
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.part_digests import PartDigests

MOST_CHECKS = 8
"""Largest number of checks for one line of code."""
MOST_KEPT_BYTES = 2**26
"""Largest total size of the microbatches that are kept for a check in one step. The first
microbatch is always kept."""


class Counts(NamedTuple):
    """The range, and a digest, of the counts that the forward of one rank (or chunk) has read at
    one line of code."""

    low: float
    high: float
    digest: str

    @property
    def text(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


class KnownCounts:
    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}
        """Maps each line of code to the range of counts that need no check."""
        self._checks: dict[str, int] = {}

    def has(self, line: str, low: float, high: float) -> bool:
        known = self._known.get(line)
        return known is not None and known[0] <= low and high <= known[1]

    def add(self, line: str, counts: Iterable[Counts], *, is_shown: bool) -> None:
        checks = self._checks[line] = self._checks.get(line, 0) + 1
        if checks >= MOST_CHECKS:
            self._known[line] = -math.inf, math.inf
        elif is_shown:
            low, high = self._known.get(line, (math.inf, -math.inf))
            lows, highs = zip(*((each.low, each.high) for each in counts), strict=True)
            self._known[line] = min(low, *lows), max(high, *highs)


class PartCounts:
    """Collects the counts that the forward of one rank (or chunk) reads."""

    def __init__(self, known: KnownCounts) -> None:
        self._known = known
        self._ranges: dict[str, tuple[float, float]] = {}
        self._digests: dict[str, Any] = {}

    def note(self, line: str, value: Any) -> None:
        low, high = _range_of(value)
        if self._known.has(line, low, high):
            return
        if line not in self._ranges:
            self._ranges[line] = low, high
            self._digests[line] = hashlib.blake2b(digest_size=6)
        lowest, highest = self._ranges[line]
        self._ranges[line] = min(lowest, low), max(highest, high)
        is_array = isinstance(value, np.ndarray)
        self._digests[line].update(value.tobytes() if is_array else repr(value).encode())

    def by_line(self) -> dict[str, Counts]:
        return {
            line: Counts(*ends, self._digests[line].hexdigest())
            for line, ends in self._ranges.items()
        }


def _range_of(value: Any) -> tuple[float, float]:
    if isinstance(value, np.ndarray):
        numbers = [value.min().item(), value.max().item()] if value.size else [0]
    else:
        numbers = list(numbers_in(value)) or [0]
    if not all(isinstance(each, int | float) for each in numbers):
        return 0, 0
    if any(map(math.isnan, numbers)):
        return -math.inf, math.inf
    return float(min(numbers)), float(max(numbers))


def numbers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from numbers_in(each)
    else:
        yield value


class Place(NamedTuple):
    """Identifies the forward of one rank (or of one chunk) of a microbatch."""

    axis: int
    forward: int
    part: int
    parts: int


CountsByPlace = dict[Place, dict[str, Counts]]


@dataclass(slots=True)
class StepCounts:
    """The counts that forwards on this rank have read in a step, or in an evaluation."""

    arguments: list[Any] = field(default_factory=list)
    microbatches: int = 0
    noted: dict[int, CountsByPlace] = field(default_factory=dict)
    kept_bytes: int = 0


class DifferentCounts(NamedTuple):
    """The first microbatch in which ranks (or chunks) have read different counts at a line of
    code."""

    microbatch: int
    lines: dict[str, dict[Place, Counts]]


class CountReads(PartDigests):
    """Collects the counts of tokens that a step's forwards read into Python. The counts are
    compared between the ranks that divide a sequence's tokens."""

    def __init__(self, world: World, *, is_summed: bool) -> None:
        super().__init__(world, is_summed=is_summed)
        self.known = KnownCounts()
        self._step = StepCounts()
        self.latest = self._step

    def begin_microbatch(self, arguments: Any) -> None:
        """Every rank of the axis must call this method."""
        step = self._step
        step.microbatches += 1
        size = sum(each.nbytes for each in tensors_in(arguments))
        is_next = len(step.arguments) == step.microbatches - 1
        if is_next and (not step.arguments or step.kept_bytes + size <= MOST_KEPT_BYTES):
            step.kept_bytes += size
            step.arguments.append(arguments)

    def end_part(self, forward: int, layout: TokenLayout, part: PartCounts) -> None:
        step, counts = self._step, part.by_line()
        if layout.world.size == 1 or not counts or step.microbatches > len(step.arguments):
            return
        text = repr(sorted((line, each.digest) for line, each in counts.items()))
        self.add(forward, layout, hashlib.blake2b(text.encode()))
        step.noted.setdefault(step.microbatches - 1, {})[self.place(forward, layout)] = counts

    def place(self, forward: int, layout: TokenLayout) -> Place:
        world = layout.world
        part = world.rank if isinstance(world, ChunkAxis) else self.ranks[world.rank]
        return Place(self.ranks[0], forward, part, world.size)

    def end_step(self) -> None:
        self.latest, self._step = self._step, StepCounts()
        self.clear()


def noted_to_json(noted: CountsByPlace) -> list[Any]:
    return [[*place, counts] for place, counts in noted.items()]


def noted_from_json(rows: Iterable[Any]) -> CountsByPlace:
    return {
        Place(*place): {line: Counts(*each) for line, each in counts.items()}
        for *place, counts in rows
    }


def differing_lines(noted: CountsByPlace) -> dict[str, dict[Place, Counts]]:
    forwards: dict[tuple[int, int], list[Place]] = {}
    for place in sorted(noted):
        forwards.setdefault((place.axis, place.forward), []).append(place)
    by_line: dict[str, dict[Place, Counts]] = {}
    for places in forwards.values():
        for line in dict.fromkeys(line for place in places for line in noted[place]):
            read = {place: noted[place][line] for place in places if line in noted[place]}
            if len(read) < places[0].parts or len(set(read.values())) > 1:
                by_line.setdefault(line, {}).update(read)
    return by_line


def first_different_counts(
    everyone: Sequence[Mapping[int, CountsByPlace]],
) -> DifferentCounts | None:
    for microbatch in sorted({each for theirs in everyone for each in theirs}):
        noted: CountsByPlace = {}
        for theirs in everyone:
            noted.update(theirs.get(microbatch, {}))
        if lines := differing_lines(noted):
            return DifferentCounts(microbatch, lines)
    return None
