"""How long collectives take by size, how fast each link is, and how far clocks are apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.doctor.bandwidth import algorithm_bandwidth, bus_bandwidth
from lockstep.doctor.board import Board
from lockstep.doctor.collectives import Group, exchange
from lockstep.doctor.definitions import COLLECTIVES, Collective
from lockstep.doctor.links import Link, Pair, judge, pairs_in_rounds

SIZES_BYTES = {"cpu": (2**10, 2**16, 2**20, 2**24), "cuda": (2**10, 2**16, 2**20, 2**24, 2**28)}
SIZE_SECONDS = 0.06
"""About so long each size of each collective is repeated."""
MOST_REPEATS = 20
LONGEST_SECONDS = 1.0
"""A size that would take longer than this, by the one before, is left out."""
PINGS = 20
TRANSFER_SECONDS = 0.02
"""About so long a transfer takes by which a link's bandwidth is measured."""
TRANSFERS = 3
FIRST_BYTES = 2**16
LARGEST_BYTES = {"cpu": 2**24, "cuda": 2**28}
LOOKS = 5
"""A link that stands out is measured so often in all, and its best counts: a moment's noise is no slow link."""


def collectives(board: Board, group: Group) -> list[dict[str, Any]]:
    """Time every collective on all ranks in float32. Every rank calls it.

    Returns, of each collective and size: `collective`, `size_bytes` (as nccl-tests counts it), `seconds` (the median of the repeats on
    the slowest rank), `algorithm_bandwidth` and `bus_bandwidth` in bytes a second (None for a barrier).
    """
    rows = []
    for collective in COLLECTIVES:
        before: float | None = None
        for size_bytes in (0,) if collective == "barrier" else SIZES_BYTES[group.device.type]:
            if before is not None and before * 16 > LONGEST_SECONDS:
                break
            with board.probe(f"{collective} of {size_bytes} bytes"):
                before = _timed(board, group, collective, size_bytes)
            rates: tuple[float | None, float | None] = (None, None)
            if size_bytes:
                rates = algorithm_bandwidth(size_bytes, before), bus_bandwidth(collective, size_bytes, before, len(group.members))
            rows.append(
                {
                    "collective": collective,
                    "size_bytes": size_bytes,
                    "seconds": before,
                    "algorithm_bandwidth": rates[0],
                    "bus_bandwidth": rates[1],
                }
            )
    return rows


def _timed(board: Board, group: Group, collective: Collective, size_bytes: int) -> float:
    size = len(group.members)
    count = max(size, size_bytes // 4 // size * size)
    mine = torch.zeros(count // size if collective in ("gather", "all-gather") else count, device=group.device)

    def once() -> float:
        _settle(group)
        began = time.perf_counter()
        exchange(collective, mine, group)
        _settle(group)
        return time.perf_counter() - began

    once()  # connections and buffers are made by the first
    (repeats,) = {int(each) for each in board.everyone(_repeats(once()))[:1]}
    times = []
    for _ in range(repeats):
        dist.barrier(group=group.process_group)
        times.append(once())
    return max(float(each) for each in board.everyone(statistics.median(times)))


def _repeats(seconds: float) -> int:
    return max(2, min(MOST_REPEATS, int(SIZE_SECONDS / seconds)))


def _settle(group: Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize()


def links(board: Board, group: Group, places: Sequence[int], machines: Sequence[str], kind: Callable[[Pair], str]) -> list[Link]:
    """Every pair's link, both ways. Every rank calls it. `places[r]` and `machines[r]`: the number and the name of rank r's machine."""
    best: dict[Pair, Link] = {}
    rounds = pairs_in_rounds(places)
    for _ in range(LOOKS):
        for link in _measured(board, group, rounds, kind):
            pair = link.sender, link.receiver
            known = best.get(pair, link)
            best[pair] = Link(*pair, min(link.seconds, known.seconds), max(link.bytes_per_second, known.bytes_per_second), link.kind)
        suspects = {tuple(sorted(pair)) for finding in judge(best.values(), machines) for pair in finding.pairs}
        rounds = [left for pairs in rounds if (left := [pair for pair in pairs if pair in suspects])]
        if not rounds:
            break
    return [best[pair] for pair in sorted(best)]


def _measured(board: Board, group: Group, rounds: Sequence[Sequence[Pair]], kind: Callable[[Pair], str]) -> list[Link]:
    mine = []
    for pairs in rounds:
        with board.probe("the links between ranks " + ", ".join(f"{one} and {other}" for one, other in pairs[:4])):
            for pair in pairs:
                if group.me in pair:
                    mine += _both_ways(group, pair, kind(pair))
            board.together()
    with board.probe("the links"):
        everyone = board.everyone([[link.sender, link.receiver, link.seconds, link.bytes_per_second, link.kind] for link in mine])
    return [Link(*each) for part in everyone for each in part]


def _both_ways(group: Group, pair: Pair, kind: str) -> list[Link]:
    """What this rank measured, the one that sends. The other only answers."""
    found = []
    for sender, receiver in (pair, pair[::-1]):
        peer = receiver if group.me == sender else sender
        if group.me != sender:
            _answer(group, peer)
            continue
        latency = _ping(group, peer) / 2
        count, taken = FIRST_BYTES, _transfer(group, peer, FIRST_BYTES)
        while taken < TRANSFER_SECONDS and count < LARGEST_BYTES[group.device.type]:
            count *= 4
            taken = _transfer(group, peer, count)
        taken = min(taken, *(_transfer(group, peer, count) for _ in range(TRANSFERS - 1)))
        _announce(group, peer, 0)
        found.append(Link(sender, receiver, latency, count / max(taken - 2 * latency, taken / 2), kind))
    return found


def _ping(group: Group, peer: int) -> float:
    """The best round trip of a few bytes, in seconds."""
    times = []
    for _ in range(PINGS):
        began = time.perf_counter()
        _announce(group, peer, 1)
        _received(group, peer, 1)
        times.append(time.perf_counter() - began)
    return min(times)


def _transfer(group: Group, peer: int, count: int) -> float:
    """Seconds from the start of one message to the answer that it has arrived."""
    content = torch.zeros(count, dtype=torch.uint8, device=group.device)
    _announce(group, peer, count)
    _received(group, peer, 1)
    began = time.perf_counter()
    dist.send(content, peer)
    _received(group, peer, 1)
    return time.perf_counter() - began


def _answer(group: Group, peer: int) -> None:
    """Do what the peer announces, until it announces nothing. 1 asks for an answer alone."""
    while count := int(_received(group, peer, 8).view(torch.int64)[0]):
        content = torch.empty(count, dtype=torch.uint8, device=group.device)
        _say(group, peer)
        if count > 1:
            dist.recv(content, peer)
            _settle(group)
            _say(group, peer)


def _announce(group: Group, peer: int, count: int) -> None:
    dist.send(torch.tensor([count], device=group.device).view(torch.uint8), peer)


def _say(group: Group, peer: int) -> None:
    dist.send(torch.zeros(1, dtype=torch.uint8, device=group.device), peer)


def _received(group: Group, peer: int, count: int) -> torch.Tensor:
    content = torch.empty(count, dtype=torch.uint8, device=group.device)
    dist.recv(content, peer)
    _settle(group)
    return content


def clocks(board: Board, group: Group, firsts: Sequence[int]) -> list[tuple[float, float]]:
    """How far each machine's clock is ahead of the first one's, and by how much that may be wrong, in seconds. Every rank calls it.

    `firsts`: a rank of each machine. It notes its clock before and after an answer that says rank 0's; the quickest answer counts.
    """
    mine = (0.0, 0.0)
    for first in firsts[1:]:
        with board.probe(f"the clock of rank {first}'s machine"):
            if group.me == first:
                mine = min((_clock_once(firsts[0]) for _ in range(PINGS)), key=lambda found: found[1])
            elif group.me == firsts[0]:
                for _ in range(PINGS):
                    dist.recv(torch.empty(1, dtype=torch.float64), first)
                    dist.send(torch.tensor([time.time()], dtype=torch.float64), first)
            board.together()
    with board.probe("the clocks"):
        everyone = board.everyone(mine)
    return [(float(everyone[first][0]), float(everyone[first][1])) for first in firsts]


def _clock_once(reference: int) -> tuple[float, float]:
    said = torch.zeros(1, dtype=torch.float64)
    before, began = time.time(), time.perf_counter()
    dist.send(said, reference)
    dist.recv(said, reference)
    half = (time.perf_counter() - began) / 2
    return before + half - float(said[0]), half
