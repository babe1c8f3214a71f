"""Copies of memory images on other hosts: the loss of a whole host loses no state.

Each rank sends its image to a *buddy* on the next host, which keeps it in two slots of its own and
writes the header last: either process may be killed at any moment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.images.slots import FILE_START, HEADER_BYTES, Header, ImageMemory, Slot
from lockstep.comm.world import World

_HEADER_TAG, _FILE_TAG, _TEXT_TAG = range(3)


def buddy_of_each(local_sizes: Sequence[int]) -> list[int]:
    """Return each rank's buddy, on the next host, evenly spread. `local_sizes`: ranks of each host,
    two hosts or more."""
    starts = [0, *accumulate(local_sizes)]
    return [
        starts[(host + 1) % len(local_sizes)]
        + local_rank % local_sizes[(host + 1) % len(local_sizes)]
        for host, size in enumerate(local_sizes)
        for local_rank in range(size)
    ]


class Buddies:
    """The images that this rank keeps for others, and its own at its buddy. Every rank makes one
    and calls all methods alike. On one host they do nothing."""

    def __init__(self, world: World) -> None:
        self._world = world
        buddies = buddy_of_each(_local_sizes(world)) if world.local_size != world.size else []
        self._mine = buddies[world.rank] if buddies else None
        self._kept = {
            rank: ImageMemory() for rank, buddy in enumerate(buddies) if buddy == world.rank
        }
        """Memory for each rank whose buddy this one is."""
        self.size_bytes = 0

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the memory that this rank keeps for others."""
        return [memory.descriptor for memory in self._kept.values()]

    @property
    def newest(self) -> list[int]:
        """The newest step of each image that this rank keeps."""
        return [memory.newest for memory in self._kept.values()]

    def allocate(self, file_bytes: int) -> None:
        """Allocate memory for others' files. `file_bytes`: of this rank's file. Raises `OSError`,
        perhaps on some ranks only."""
        if self._mine is None:
            return
        everyone = self._world.gather_values(file_bytes)
        self.size_bytes = max(
            self.size_bytes, sum(2 * (FILE_START + everyone[rank]) for rank in self._kept)
        )
        for rank, memory in self._kept.items():
            memory.allocate(everyone[rank])

    def exchange(self, own: Slot, text: bytes, header: Header, common: int) -> float:
        """Send this rank's complete image to its buddy, and receive others'. Images of step
        `common` stay. Returns the seconds waited for data."""
        if self._mine is None:
            return 0.0
        slots = {rank: memory.oldest_but(common) for rank, memory in self._kept.items()}
        heads = {rank: torch.empty(HEADER_BYTES, dtype=torch.uint8) for rank in slots}
        for slot in slots.values():
            slot.begin()
        receiving = {
            rank: (
                self._receive(heads[rank], rank, _HEADER_TAG),
                self._receive(slot.file, rank, _FILE_TAG),
            )
            for rank, slot in slots.items()
        }
        sent = {
            _HEADER_TAG: _tensor(header.packed()),
            _FILE_TAG: own.file,
            _TEXT_TAG: _tensor(text),
        }
        sending = [
            dist.isend(data, group=self._world.group, group_dst=self._mine, tag=tag)
            for tag, data in sent.items()
        ]
        seconds = 0.0
        for rank, (head, file) in receiving.items():
            head.wait()
            began = time.perf_counter()
            theirs = Header.read(bytes(heads[rank].numpy()))
            assert theirs is not None
            their_text = torch.empty(theirs.text_bytes, dtype=torch.uint8)
            self._receive(their_text, rank, _TEXT_TAG).wait()
            file.wait()
            seconds += time.perf_counter() - began
            slots[rank].complete(bytes(their_text.numpy()), theirs)
        for work in filter(None, sending):
            work.wait()
        return seconds

    def close(self) -> None:
        for memory in self._kept.values():
            memory.close()

    def _receive(self, data: Tensor, rank: int, tag: int) -> dist.Work:
        work = dist.irecv(data, group=self._world.group, group_src=rank, tag=tag)
        assert work is not None
        return work


def _local_sizes(world: World) -> list[int]:
    """Return the number of ranks of each host, whose ranks are contiguous."""
    by_rank = world.gather_rows(torch.tensor([world.local_size]), [1] * world.size).tolist()
    found: list[int] = []
    while sum(found) < world.size:
        found.append(by_rank[sum(found)])
    return found


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
