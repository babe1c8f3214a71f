"""The counts of tokens that a forward reads on the host.

Counts of chosen tokens differ between ranks: the number of tokens of an expert, or whether any
token is masked. A model may use counts to skip code that would compute nothing. If it uses them in
another way (`x * count`, or `if rare.any(): x = 2 * x`), each rank computes a different model. Only
the results show which it is: when ranks first read different counts at a line, some of their tokens
are computed whole and cut, and the outputs are compared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lockstep.base.nested import tensors_in
from lockstep.comm.world import World
from lockstep.model.context.chunk_axis import ChunkAxis
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.part_digests import PartDigests

MOST_CHECKS = 8
"""Largest number of checks of the counts at one line."""
MOST_KEPT_BYTES = 2**26
"""Largest total size of a step's microbatches that are kept for a check. The first microbatch is
always kept."""


class Counts(NamedTuple):
    """The counts that one part of a forward has read at a line."""

    low: float
    high: float
    digest: str
    """The digest of all these counts, in order."""

    @property
    def text(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


class KnownCounts:
    """For each line, the counts that were checked: they do not change the model's output."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}
        """Line -> the range of counts that was checked."""
        self._checks: dict[str, int] = {}

    def has(self, line: str, low: float, high: float) -> bool:
        known = self._known.get(line)
        return known is not None and known[0] <= low and high <= known[1]

    def add(self, line: str, counts: Iterable[Counts], *, is_shown: bool) -> None:
        """Add the counts of a line after a check. `is_shown`: False if the ranks read equal counts
        at the line during the check."""
        checks = self._checks[line] = self._checks.get(line, 0) + 1
        if checks >= MOST_CHECKS:
            self._known[line] = -math.inf, math.inf
        elif is_shown:
            low, high = self._known.get(line, (math.inf, -math.inf))
            lows, highs = zip(*((each.low, each.high) for each in counts), strict=True)
            self._known[line] = min(low, *lows), max(high, *highs)


class PartCounts:
    """Collects the counts that one part of a forward reads, except known ones."""

    def __init__(self, known: KnownCounts) -> None:
        self._known = known
        self._ranges: dict[str, tuple[float, float]] = {}
        self._digests: dict[str, Any] = {}

    def note(self, line: str, value: Any) -> None:
        """Note a count, or the counts in a list, a tuple or an array."""
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
    """Return the smallest and the largest number; 0 if there is none."""
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
    """Yield the numbers in nested lists and tuples."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from numbers_in(each)
    else:
        yield value


class Place(NamedTuple):
    """A part of a forward."""

    axis: int
    """The first rank of the axis."""
    forward: int
    part: int
    """The rank, among all ranks, or the index of the chunk."""
    parts: int
    """Number of parts of a forward."""


Noted = dict[Place, dict[str, Counts]]
"""The counts that parts of forwards have read."""


@dataclass(slots=True)
class StepCounts:
    """The counts that were read in a step, or in an evaluation, on this rank."""

    arguments: list[Any] = field(default_factory=list)
    """The arguments of the first microbatches."""
    microbatches: int = 0
    noted: dict[int, Noted] = field(default_factory=dict)
    """Index of a microbatch -> its counts."""
    kept_bytes: int = 0


class DifferentCounts(NamedTuple):
    """A microbatch for whose tokens the ranks have read different counts."""

    microbatch: int
    lines: dict[str, dict[Place, Counts]]
    """Line -> by part of the forward, the counts that differ."""


class CountReads:
    """The counts that the ranks of `world`, which divide each microbatch's tokens, read in a
    step."""

    def __init__(self, world: World, *, is_summed: bool) -> None:
        """`is_summed`: True if the numbers of a step are summed over `world`."""
        self.known = KnownCounts()
        self._digests = PartDigests(world, is_summed=is_summed)
        self.count = self._digests.count
        """Number of values that `numbers` returns."""
        self._step = StepCounts()
        self.latest = self._step
        """The counts of the step that `end_step` has ended."""

    def begin_microbatch(self, arguments: Any) -> None:
        """Begin the forward of a microbatch. Every rank of the axis calls it. `arguments`: the
        model's arguments for all tokens."""
        step = self._step
        step.microbatches += 1
        size = sum(each.nbytes for each in tensors_in(arguments))
        is_next = len(step.arguments) == step.microbatches - 1
        if is_next and (not step.arguments or step.kept_bytes + size <= MOST_KEPT_BYTES):
            step.kept_bytes += size
            step.arguments.append(arguments)

    def end_part(self, forward: int, layout: TokenLayout, part: PartCounts) -> None:
        """Add the counts of a part of a forward. `layout`: the layout of the part's tokens."""
        step, counts = self._step, part.by_line()
        if layout.world.size == 1 or not counts or step.microbatches > len(step.arguments):
            return
        text = repr(sorted((line, each.digest) for line, each in counts.items()))
        self._digests.add(forward, layout, hashlib.blake2b(text.encode()))
        step.noted.setdefault(step.microbatches - 1, {})[self.place(forward, layout)] = counts

    def place(self, forward: int, layout: TokenLayout) -> Place:
        """Return the `Place` of a part of a forward. `layout`: the layout of the part's tokens."""
        world = layout.world
        part = world.rank if isinstance(world, ChunkAxis) else self._digests.ranks[world.rank]
        return Place(self._digests.axis, forward, part, world.size)

    def numbers(self) -> list[float]:
        """Return numbers whose sums over all ranks are 0 if and only if all parts of each forward
        have read equal counts. Every rank of the axis calls it."""
        return self._digests.numbers()

    def end_step(self) -> None:
        """Keep the counts since the previous step as `latest`."""
        self.latest, self._step = self._step, StepCounts()
        self._digests.clear()


def noted_to_json(noted: Noted) -> list[Any]:
    return [[*place, counts] for place, counts in noted.items()]


def noted_from_json(rows: Iterable[Any]) -> Noted:
    """Return the recorded counts. `rows`: concatenated results of `noted_to_json`."""
    return {
        Place(*place): {line: Counts(*each) for line, each in counts.items()}
        for *place, counts in rows
    }


def differing_lines(noted: Noted) -> dict[str, dict[Place, Counts]]:
    """Return the lines at which parts of the same forward have read different counts, and these
    counts."""
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


def first_different_counts(everyone: Sequence[Mapping[int, Noted]]) -> DifferentCounts | None:
    """Return the first microbatch in which parts of a forward have read different counts."""
    for microbatch in sorted({each for theirs in everyone for each in theirs}):
        noted: Noted = {}
        for theirs in everyone:
            noted.update(theirs.get(microbatch, {}))
        if lines := differing_lines(noted):
            return DifferentCounts(microbatch, lines)
    return None


def shapes_of(result: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in a result."""
    several = result if isinstance(result, tuple | list) else (result,)
    return [tuple(each.shape) for each in several if isinstance(each, Tensor)]
