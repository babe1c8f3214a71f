"""Records the order in which a rank calls FSDP2's collectives ("exchanges") in one process group.
Gloo and NCCL do not compare the order. If ranks exchange different blocks of the same size, the
sums are wrong. Ranks that exchange blocks of different sizes hang or crash. The ranks compare
digests of the order at the end of each step. If a rank waits for long, the watchdogs, which detect
hangs, compare the records."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch.distributed as dist

from lockstep.base.errors import RecipeError
from lockstep.comm.compared_bits import BITS, compared_bits
from lockstep.comm.world import World
from lockstep.model.shard import error_of_order

END = 0
"""Label that marks the end of a step, an evaluation, or a forward that belongs to no microbatch."""
MOST_RECENT = 50


class Doing:
    """The part of a step that this rank is computing, for error messages and hang reports."""

    text = ""


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The exchanges of one rank in one process group and one step."""

    rank: int
    order: int
    group: int
    """First rank of the process group."""
    step: int
    first: int
    """Number of earlier exchanges of the same step."""
    calls: tuple[tuple[str, str], ...]
    """Label and part of the step for each exchange, such as ("gathers block 'a'", "in the forward
    of microbatch 3")."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Exchanges:
        return cls(**{**values, "calls": tuple((what, when) for what, when in values["calls"])})

    @property
    def latest(self) -> str:
        return f"{self._text(-1)}, exchange {self.first + len(self.calls)} of the step"

    def at(self, place: int) -> str:
        return f"rank {self.rank} {self._text(place - self.first)}"

    def _text(self, place: int) -> str:
        return " ".join(self.calls[place]).rstrip()


def first_different_exchange(everyone: Sequence[Exchanges]) -> str | None:
    alike: dict[tuple[int, int, int], list[Exchanges]] = {}
    for each in everyone:
        alike.setdefault((each.order, each.group, each.step), []).append(each)
    for one, *others in alike.values():
        for other in others:
            start = max(one.first, other.first)
            stop = min(each.first + len(each.calls) for each in (one, other))
            for place in range(start, stop):
                if one.calls[place - one.first][0] != other.calls[place - other.first][0]:
                    return f"{one.at(place)} and {other.at(place)}"
    return None


Calls = list[tuple[int, str]]
"""List of exchanges: the number of a label, and the part of the step."""


class _Steps(NamedTuple):
    """The exchanges of the previous step and the current step. One assignment replaces the
    exchanges of both steps, because other threads read them."""

    number: int
    before: Calls
    calls: Calls


class ExchangeOrder:
    """Records the order of this rank's exchanges over one process group."""

    def __init__(self, world: World, summed: World, doing: Doing) -> None:
        """All ranks in `summed` create an `ExchangeOrder` at the same time, for their own process
        groups."""
        self._ranks = dist.get_process_group_ranks(world.group)
        # after a failed run, ranks may have made different numbers of orders
        firsts, numbers = zip(
            *summed.gather_values([min(self._ranks), next(_numbers)]), strict=True
        )
        groups = sorted(set(firsts))
        self._number = max(numbers)
        self._world = world
        self._place = groups.index(min(self._ranks))
        self._groups = len(groups)
        self._doing = doing
        self._labels = ["ends the step"]
        self._digest = 0
        self._steps = _Steps(0, [], [])
        self._latest: float | None = None
        """Time at which the latest exchange began. None if no step is in progress."""

    def label(self, text: str) -> int:
        """Every rank must call this method with the same texts in the same order."""
        if text not in self._labels:
            self._labels.append(text)
        return self._labels.index(text)

    def note(self, label: int) -> None:
        self._steps.calls.append((label, self._doing.text))
        self._digest = zlib.crc32(label.to_bytes(4, "little"), self._digest)
        self._latest = time.monotonic()

    @property
    def count(self) -> int:
        return BITS * self._groups

    def numbers(self) -> list[float]:
        return digest_numbers(
            self._digest,
            rank=self._world.rank,
            size=self._world.size,
            group=self._place,
            groups=self._groups,
        )

    def end_step(self) -> None:
        """Begin to record the next step."""
        self.note(END)
        self._steps = _Steps(self._steps.number + 1, self._steps.calls, [])

    def settle(self) -> None:
        self._latest = None

    @property
    def seconds(self) -> float:
        """Seconds since the latest exchange began; 0 between steps."""
        latest = self._latest
        return 0.0 if latest is None else time.monotonic() - latest

    def recent(self) -> list[Exchanges]:
        """Return the latest exchanges of the previous step and the current step. Any thread may
        call this method."""
        number, before, calls = self._steps
        return [
            self._exchanges(number - 1, before, MOST_RECENT),
            self._exchanges(number, list(calls), MOST_RECENT),
        ]

    def _exchanges(self, step: int, calls: Calls, most: int) -> Exchanges:
        first = max(0, len(calls) - most)
        texts = tuple((self._labels[label], doing) for label, doing in calls[first:])
        mine = self._ranks[self._world.rank]
        return Exchanges(mine, self._number, min(self._ranks), step, first, texts)

    def difference(self) -> str | None:
        """Every rank of the group must call this method."""
        number, before, _ = self._steps
        mine = self._exchanges(number - 1, before, len(before))
        everyone = self._world.gather_values([mine.rank, mine.step, mine.calls])
        return first_different_exchange(
            [
                Exchanges(rank, mine.order, mine.group, step, 0, tuple(map(tuple, calls)))
                for rank, step, calls in everyone
            ]
        )

    def error(self, difference: str | None) -> RecipeError:
        return error_of_order(difference or "ranks gather or reduce different blocks")


_numbers = count()


def digest_numbers(digest: int, *, rank: int, size: int, group: int, groups: int) -> list[float]:
    """Encode a digest in numbers. The numbers add up to 0 over all ranks if and only if the digests
    agree in each process group."""
    row = [0.0] * (BITS * groups)
    row[group * BITS : (group + 1) * BITS] = compared_bits(digest, rank=rank, size=size)
    return row
