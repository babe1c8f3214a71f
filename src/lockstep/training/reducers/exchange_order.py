"""The order of a rank's exchanges in one process group. It must be the same on all ranks of the
group.

Shared memory compares the label of each exchange. Gloo and NCCL compare nothing: if ranks exchange
different blocks of the same size, the sums are wrong; if the sizes differ, the ranks hang or crash.
So each rank records its exchanges and a digest of their order. The digests are compared at the end
of each step. While a rank waits, the watchdogs compare the records.
"""

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
"""The label that ends a step, an evaluation or a trial."""
MOST_TOLD = 50
"""Number of exchanges, the latest ones, that a rank reports while it waits."""


class Doing:
    """The part of a step that a rank computes now."""

    text = ""
    """For example "in the forward of microbatch 3"."""


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The exchanges of a rank in one process group, in one step. Sent as JSON."""

    rank: int
    order: int
    """The number of the `ExchangeOrder`, the same on all ranks of the group."""
    group: int
    """The first rank of the group."""
    step: int
    """Number of steps, evaluations and trials that have ended."""
    first: int
    """Number of exchanges in the step before these."""
    calls: tuple[tuple[str, str], ...]
    """(an exchange, the part of the step): "gathers block 'a'", "in the forward of microbatch
    3"."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Exchanges:
        return cls(**{**values, "calls": tuple((what, when) for what, when in values["calls"])})

    @property
    def latest(self) -> str:
        return f"{self._text(-1)}, exchange {self.first + len(self.calls)} of the step"

    def at(self, place: int) -> str:
        """Return text with the rank, the exchange's label and the part of the step."""
        return f"rank {self.rank} {self._text(place - self.first)}"

    def _text(self, place: int) -> str:
        return " ".join(self.calls[place]).rstrip()


def first_different_exchange(everyone: Sequence[Exchanges]) -> str | None:
    """Return the first difference between the exchanges that two ranks have both made; None if
    there is none. Ranks may be in different steps."""
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
"""The label of each exchange, and the part of the step."""


class _Steps(NamedTuple):
    """The exchanges of two steps. Other threads read them, so a step ends in one assignment."""

    number: int
    """Number of steps that have ended."""
    before: Calls
    """The exchanges of the previous step."""
    calls: Calls
    """The exchanges of this step."""


class ExchangeOrder:
    """The order of this rank's exchanges over `world`."""

    def __init__(self, world: World, summed: World, doing: Doing) -> None:
        """`summed`: the ranks that sum the numbers of a step, among them `world`; all of them make
        an `ExchangeOrder`. `doing`: the part of the step at each exchange."""
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
        """The time of the latest exchange; None once all ranks have ended the step."""

    def label(self, text: str) -> int:
        """Return a number for the text. Every rank labels the same texts in the same order."""
        if text not in self._labels:
            self._labels.append(text)
        return self._labels.index(text)

    def note(self, label: int) -> None:
        """Note an exchange of this rank."""
        self._steps.calls.append((label, self._doing.text))
        self._digest = zlib.crc32(label.to_bytes(4, "little"), self._digest)
        self._latest = time.monotonic()

    @property
    def count(self) -> int:
        """Number of values that `numbers` returns."""
        return BITS * self._groups

    def numbers(self) -> list[float]:
        """Return the numbers of this rank's digest; see `numbers_of`."""
        return numbers_of(
            self._digest,
            rank=self._world.rank,
            size=self._world.size,
            group=self._place,
            groups=self._groups,
        )

    def end_step(self) -> None:
        """Keep the step's exchanges, so that an error can name a difference."""
        self.note(END)
        self._steps = _Steps(self._steps.number + 1, self._steps.calls, [])

    def settle(self) -> None:
        """Note that all ranks have ended the step."""
        self._latest = None

    @property
    def seconds(self) -> float:
        """Seconds since the latest exchange began; 0 if all ranks have ended the step."""
        latest = self._latest
        return 0.0 if latest is None else time.monotonic() - latest

    def told(self, most: int = MOST_TOLD) -> list[Exchanges]:
        """Return the exchanges of the previous step and of this one. Any thread may call it."""
        number, before, calls = self._steps
        return [
            self._exchanges(number - 1, before, most),
            self._exchanges(number, list(calls), most),
        ]

    def _exchanges(self, step: int, calls: Calls, most: int) -> Exchanges:
        first = max(0, len(calls) - most)
        texts = tuple((self._labels[label], doing) for label, doing in calls[first:])
        mine = self._ranks[self._world.rank]
        return Exchanges(mine, self._number, min(self._ranks), step, first, texts)

    def difference(self) -> str | None:
        """Return the first difference between the ranks' exchanges in the last step; None if there
        is none. Every rank of `world` calls it."""
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


def numbers_of(digest: int, *, rank: int, size: int, group: int, groups: int) -> list[float]:
    """Return numbers whose sums over all ranks of all groups are 0 if and only if the digests agree
    in each group. `rank`, `size`: this rank's number in `group`, and the group's size."""
    row = [0.0] * (BITS * groups)
    row[group * BITS : (group + 1) * BITS] = compared_bits(digest, rank=rank, size=size)
    return row
