"""In-memory checkpoints ("images"): every few steps, each rank copies its shards of the state to
host memory. The memory outlives the rank's process, because the launcher keeps it open through
`/proc/<process>/fd/<descriptor>`. Each rank has two slots, which take twice the bytes of its
part."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.errors import CheckpointError
from lockstep.base.system import require_linux
from lockstep.base.torch_private import is_distributed
from lockstep.checkpoint.images import FILE_START, HEADER_BYTES, Header, ImageMemory, Slot
from lockstep.checkpoint.manifest import JsonObject
from lockstep.checkpoint.saver import MappedShards, assign_to_this_rank
from lockstep.checkpoint.storage import CheckpointName
from lockstep.checkpoint.tensor_shards import FileLayout, local_shards
from lockstep.comm.world import World


class ImageWriter:
    """Every rank creates an `ImageWriter`, and calls `prepare` and `write` at the same points."""

    def __init__(self, world: World, attempt: str, metadata: JsonObject) -> None:
        """Each start of a run that repeats steps needs a new `attempt`. `metadata` is used on rank
        0 only."""
        require_linux("images of the state in memory")
        self._world = world
        self._attempt = attempt
        self._metadata = metadata
        self._memory = ImageMemory()
        self._buddies = Buddies(world)
        self._layout: FileLayout | None = None
        self._shards: dict[Slot, MappedShards] = {}
        self._kinds: dict[str, tuple[Any, ...]] | None = None
        self._last: dict[str, tuple[Tensor, tuple[Any, ...]]] = {}
        self._described = b""
        self.size_bytes = 0
        self.sending_seconds = 0.0
        """Time that the last write waited for the network."""

    @property
    def descriptors(self) -> list[int]:
        """Includes the memory for images of ranks on another host."""
        return [self._memory.descriptor, *self._buddies.descriptors]

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Assign shards to ranks and allocate memory, unless the layout is unchanged. All ranks
        call this method, or the first `write` calls it. If one rank cannot allocate memory, all
        ranks raise `CheckpointError`."""
        self._agree(tensors, ())

    def write(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        values: JsonObject,
        figures: Sequence[float] = (),
    ) -> list[float]:
        """Copy the state after `step` steps. Every rank must call this method. After an error, the
        newest image that all ranks have is still complete. Return the maximum of each figure over
        the ranks."""
        common, largest = self._agree(tensors, figures)
        slot = self._memory.oldest_but(common)
        assert self._layout is not None
        encoded = json.dumps(values, separators=(",", ":")).encode()
        text = b'{%b,"values":%b}' % (self._described, encoded)
        slot.begin(self._layout.header)
        self._shards[slot].copy(tensors)
        name = CheckpointName(step, self._attempt)
        header = Header(name, self._world.rank, self._world.size, slot.text_start, len(text))
        slot.complete(text, header)
        self.sending_seconds = self._buddies.exchange(slot, text, header, common)
        return largest

    def close(self) -> None:
        """Other processes may still hold the memory's descriptor."""
        self._shards, self._last = {}, {}
        self._memory.close()
        self._buddies.close()

    def _agree(
        self, tensors: Mapping[str, Tensor], figures: Sequence[float]
    ) -> tuple[int, list[float]]:
        """Return the newest step whose image all ranks have, and the maximum of each figure over
        the ranks. No rank may overwrite the step's image."""
        # finding a DTensor's shard takes 100 µs; comparing the properties on which it depends takes
        # almost no time
        last = self._last
        kinds = {
            name: last[name][1] if name in last and last[name][0] is tensor else _kind(tensor)
            for name, tensor in tensors.items()
        }
        self._last = {name: (tensor, kinds[name]) for name, tensor in tensors.items()}
        newest = min([self._memory.newest, *self._buddies.newest])
        mine = torch.tensor([[kinds != self._kinds, newest, *figures]], dtype=torch.float64)
        rows = self._world.gather_rows(mine, [1] * self._world.size)
        if rows[:, 0].any():
            self._kinds = None
            self._lay_out(FileLayout(assign_to_this_rank(local_shards(tensors), self._world)))
            self._kinds = kinds
        return int(rows[:, 1].min()), rows[:, 2:].amax(0).tolist()

    def _lay_out(self, layout: FileLayout) -> None:
        shards = [[*shard.to_json(), start] for shard, start in layout.starts.items()]
        described = {"shards": shards, "metadata": self._metadata if self._world.rank == 0 else {}}
        self._described = json.dumps(described, separators=(",", ":")).encode()[1:-1]
        self._layout, self._shards = layout, {}
        error = None
        try:
            self._buddies.allocate(layout.bytes)
            self._memory.allocate(layout.bytes)
        except OSError as failure:
            error = (
                f"rank {self._world.rank} has no memory for two images of {layout.bytes:,} bytes"
                f" ({failure.strerror})"
            )
        if failures := [each for each in self._world.gather_values(error) if each is not None]:
            raise CheckpointError(
                f"{failures[0]}; leave the images out, or spread the state over more processes"
            )
        self._shards = {slot: MappedShards(layout, slot.file) for slot in self._memory.slots}
        size_bytes = 2 * (FILE_START + layout.bytes) + self._buddies.size_bytes
        self.size_bytes = max(self.size_bytes, size_bytes)


def image_interval(copy_seconds: float, step_seconds: float, limit: float) -> int:
    """Return the number of steps between two copies. Copying takes at most the fraction `limit` of
    the training time. All ranks pass the seconds of the slowest rank."""
    return max(1, math.ceil(copy_seconds / (limit * step_seconds)))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    layout = (tensor.placements, tensor.device_mesh) if is_distributed(tensor) else ()  # type: ignore[attr-defined]
    return tensor.dtype, tensor.shape, *layout


_HEADER_TAG, _FILE_TAG, _TEXT_TAG = range(3)


def buddy_of_each(local_sizes: Sequence[int]) -> list[int]:
    """Return, for each rank, a rank on the next host. There must be at least two hosts."""
    starts = [0, *accumulate(local_sizes)]
    buddies = []
    for host, size in enumerate(local_sizes):
        following = (host + 1) % len(local_sizes)
        buddies += [starts[following] + rank % local_sizes[following] for rank in range(size)]
    return buddies


class Buddies:
    """Each rank sends its image to a *buddy* on the next host: the loss of a whole host loses no
    state. The buddy keeps the image in two slots and writes the header last, so that either process
    may be killed at any moment. Every rank makes the same calls. On a single host, nothing is
    sent."""

    def __init__(self, world: World) -> None:
        self._world = world
        buddies = buddy_of_each(_local_sizes(world)) if world.local_size != world.size else []
        self._mine = buddies[world.rank] if buddies else None
        kept_for = [rank for rank, buddy in enumerate(buddies) if buddy == world.rank]
        self._kept = {rank: ImageMemory() for rank in kept_for}
        """Memory for the images of the ranks whose buddy is this rank, by rank."""
        self.size_bytes = 0

    @property
    def descriptors(self) -> list[int]:
        return [memory.descriptor for memory in self._kept.values()]

    @property
    def newest(self) -> list[int]:
        return [memory.newest for memory in self._kept.values()]

    def allocate(self, file_bytes: int) -> None:
        """May raise `OSError` on some ranks only."""
        if self._mine is None:
            return
        everyone = self._world.gather_values(file_bytes)
        size_bytes = sum(2 * (FILE_START + everyone[rank]) for rank in self._kept)
        self.size_bytes = max(self.size_bytes, size_bytes)
        for rank, memory in self._kept.items():
            memory.allocate(everyone[rank])

    def exchange(self, own: Slot, text: bytes, header: Header, common: int) -> float:
        """Does not overwrite images of the step `common`, which all ranks have. Returns the seconds
        spent waiting for data."""
        if self._mine is None:
            return 0.0
        receiving = []
        for rank, memory in self._kept.items():
            slot, head = memory.oldest_but(common), torch.empty(HEADER_BYTES, dtype=torch.uint8)
            slot.begin()
            has_head = self._receive(head, rank, _HEADER_TAG)
            receiving.append(
                (rank, slot, head, has_head, self._receive(slot.file, rank, _FILE_TAG))
            )
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
        for rank, slot, head, has_head, has_file in receiving:
            has_head.wait()
            began = time.perf_counter()
            theirs = Header.read(bytes(head.numpy()))
            assert theirs is not None
            their_text = torch.empty(theirs.text_bytes, dtype=torch.uint8)
            self._receive(their_text, rank, _TEXT_TAG).wait()
            has_file.wait()
            seconds += time.perf_counter() - began
            slot.complete(bytes(their_text.numpy()), theirs)
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
    by_rank = world.gather_rows(torch.tensor([world.local_size]), [1] * world.size).tolist()
    sizes: list[int] = []
    while sum(sizes) < world.size:
        sizes.append(by_rank[sum(sizes)])
    return sizes


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
