"""The launcher's connections to its workers, for recovery in place."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lockstep.launch.recovery.channel import ENDED, Channel, open_channel

UNKNOWN = "its training had not begun"


@dataclass(slots=True)
class Connection:
    """The launcher's connection to one worker, and the state that the worker has reported."""

    channel: Channel
    why_not: str | None = UNKNOWN
    was_able: bool = False
    sizes: Sequence[int] = ()
    script_seconds: float = 0.0
    """Seconds from the start of the worker's script to the start of its training."""
    at: int = -1
    """Number of steps done when the worker left its collectives for a recovery. -1 if unknown."""
    refusal: str | None = None
    is_starting: bool = False
    """True for a replacement whose script has not reached its training. A starting worker is in no
    collective."""
    step: int | None = None
    """Number of steps in the state of a worker that waits for its new rank (-1 without a state).
    None for a worker that does not wait."""


@dataclass(slots=True)
class Connections:
    unused: str | None
    """The reason why workers cannot recover in place, or None if they can. Empty if recovery in
    place was not requested."""
    by_rank: dict[int, Connection] = field(default_factory=dict)
    hanging: list[tuple[Sequence[int], Mapping[str, Any]]] = field(default_factory=list)
    images: list[dict[int, list[int]]] = field(default_factory=lambda: [{}])
    """Descriptors of the shared memory with copies of training states, by rank. The list has one
    dict for each start of the run, and the current start is last."""
    all_offered: bool = False

    @contextmanager
    def opened(self, rank: int) -> Iterator[int | None]:
        """Start the worker in this context. The worker must inherit the yielded descriptor."""
        ends = open_channel() if self.unused is None else None
        if ends is None:
            yield None
            return
        channel, theirs = ends
        self.use(rank, channel)
        with theirs:
            yield theirs.fileno()

    def use(self, rank: int, channel: Channel) -> None:
        self.drop([rank])
        self.by_rank[rank] = Connection(channel)

    def note_replacement(self, rank: int) -> None:
        replacement = self.by_rank[rank]
        replacement.is_starting, replacement.why_not, replacement.was_able = True, None, True

    def drop(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            if rank in self.by_rank:
                self._read(rank)
                self.by_rank.pop(rank).channel.close()

    def renumber(self, ranks: Mapping[int, int]) -> None:
        self.by_rank = {ranks[rank]: connection for rank, connection in self.by_rank.items()}

    def look(self) -> None:
        for rank in self.by_rank:
            self._read(rank)

    def _read(self, rank: int) -> None:
        connection = self.by_rank[rank]
        while (message := connection.channel.receive(0.0)) is not None:
            match message["kind"]:
                case "able":
                    connection.why_not, connection.sizes = message["why_not"], message["sizes"]
                    connection.script_seconds = message["script_seconds"]
                    connection.was_able = connection.why_not is None or (
                        connection.was_able and connection.why_not != ENDED
                    )
                case "hangs":
                    self.hanging.append((message["ranks"], message["record"]))
                case "refuses":
                    connection.refusal = message["why_not"]
                case "ready":
                    connection.step, connection.at = message["step"], message["at"]
                    connection.why_not, connection.is_starting = None, False
                case "images":
                    self.images[-1][rank] = message["descriptors"]
                case "all-offered":
                    self.all_offered = True
        # drop the images of earlier starts once the launchers of all machines hold those of this
        # start
        if self.all_offered and self.images[-1].keys() == self.by_rank.keys():
            _close(self.images[:-1])
            del self.images[:-1]

    def why_not(self, ranks: Collection[int], lost: Collection[int] = ()) -> str | None:
        if self.unused is not None:
            return self.unused
        self.look()
        for rank in (*ranks, *lost):
            connection = self.by_rank.get(rank)
            if connection is not None and connection.refusal is not None:
                return f"rank {rank}: {connection.refusal}"
            if connection is not None and rank in lost and connection.was_able:
                continue
            if connection is None or connection.why_not is not None:
                return f"rank {rank}: {UNKNOWN if connection is None else connection.why_not}"
        return None

    def refusal(self) -> str | None:
        self.look()
        refusals = {rank: each.refusal for rank, each in self.by_rank.items() if each.refusal}
        return next((f"rank {rank}: {why}" for rank, why in refusals.items()), None)

    def largest_size(self, ranks: Sequence[int]) -> int:
        sizes = next((self.by_rank[rank].sizes for rank in ranks if self.by_rank[rank].sizes), ())
        return max((size for size in sizes if size <= len(ranks)), default=0)

    def steps_done(self) -> int:
        return max((each.at for each in self.by_rank.values() if each.step is not None), default=-1)

    def waiting(self) -> dict[int, int]:
        self.look()
        return {rank: each.step for rank, each in self.by_rank.items() if each.step is not None}

    def starting(self) -> list[int]:
        return [rank for rank, each in self.by_rank.items() if each.is_starting]

    def must_leave(self, ranks: Collection[int]) -> list[int]:
        self.look()
        connections = ((rank, self.by_rank[rank]) for rank in ranks)
        return [rank for rank, each in connections if each.step is None and not each.is_starting]

    def send(self, ranks: Collection[int], kind: str) -> None:
        for rank in ranks:
            if rank in self.by_rank:
                self.by_rank[rank].channel.send(kind)

    def rejoin(self, environments: Mapping[int, Mapping[str, str]], *, lost_at: float) -> None:
        descriptors = _descriptors(self.images)
        for rank, environment in environments.items():
            connection = self.by_rank[rank]
            connection.step = None
            connection.channel.send(
                "rejoin", descriptors, environment=dict(environment), lost_at=lost_at
            )
        self.images.append({})
        self.all_offered = False

    def release(self) -> None:
        for connection in self.by_rank.values():
            if connection.step is not None:
                connection.step = None
                connection.channel.send("restart")

    def close(self) -> None:
        self.drop(list(self.by_rank))
        _close(self.images)
        self.images, self.all_offered = [{}], False


def _descriptors(several: Sequence[Mapping[int, Sequence[int]]]) -> list[int]:
    return [descriptor for images in several for held in images.values() for descriptor in held]


def _close(several: Sequence[Mapping[int, Sequence[int]]]) -> None:
    for descriptor in _descriptors(several):
        os.close(descriptor)
