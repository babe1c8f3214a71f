"""Images: copies of the state in memory. This module has the layout of images, and reads images
under any plan, on any number of ranks. Each rank has written one part of an image. A reading rank
may see only the parts on its own machine.

The memory of one rank has two slots, one of which is always complete. The memory has no name, and
exists as long as any process holds its descriptor. A slot starts at a multiple of `SLOT_BYTES`, and
consists of:

    header           step, attempt, rank and number of ranks, position of the text; zeros
                     until all else is written
    file             the rank's file of a checkpoint (safetensors)
    text             JSON: positions of the shards, values, metadata

A write first erases the header of its slot, and writes the new header last. A process that is
killed during a write leaves the other slot intact. Nothing is hashed, because memory is more
reliable than a disk. Only Linux is supported.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.base.dtypes import TensorSpec, torch_dtype
from lockstep.checkpoint.load import copies_by_shard, fill
from lockstep.checkpoint.manifest import Manifest, merge_objects
from lockstep.checkpoint.storage import CheckpointName
from lockstep.checkpoint.tensor_shards import ShardCopy, TensorShard
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World

SLOT_BYTES = 1 << 40
"""Larger than any rank's part of an image. Unwritten pages take no memory."""
FILE_START = mmap.ALLOCATIONGRANULARITY
NONE = -1
"""Step of a slot whose image is incomplete."""
_MAGIC = b"lockstp1"
_HEADER = struct.Struct("<8s8sQIIQQ")
_SUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _SUM.size


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one rank's in-memory checkpoint ("image")."""

    name: CheckpointName
    rank: int
    size: int
    text_start: int
    text_bytes: int

    def packed(self) -> bytes:
        named = self.name.attempt.encode(), self.name.step, self.rank, self.size
        data = _HEADER.pack(_MAGIC, *named, self.text_start, self.text_bytes)
        return data + _SUM.pack(zlib.crc32(data))

    @classmethod
    def read(cls, data: bytes) -> Header | None:
        packed = data[: _HEADER.size]
        if not packed.startswith(_MAGIC) or _SUM.pack(zlib.crc32(packed)) != data[_HEADER.size :]:
            return None
        _, attempt, step, *numbers = _HEADER.unpack(packed)
        return cls(CheckpointName(step, attempt.decode()), *numbers)


class Slot:
    def __init__(self, descriptor: int, number: int) -> None:
        self._descriptor = descriptor
        self._start = number * SLOT_BYTES
        self.step = NONE
        """`NONE` if the image is incomplete."""
        self.file = torch.empty(0, dtype=torch.uint8)

    def allocate(self, file_bytes: int) -> None:
        """Keeps the current image. Raises `OSError`."""
        size = FILE_START + file_bytes
        self.file = torch.empty(0, dtype=torch.uint8)
        # raises if memory is short; without it, the first access would end the process
        os.posix_fallocate(self._descriptor, self._start, size)
        # page faults make the first write several times slower than later ones
        populated = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = mmap.mmap(self._descriptor, size, flags=populated, offset=self._start)
        self.file = torch.frombuffer(memory, dtype=torch.uint8, offset=FILE_START)

    @property
    def text_start(self) -> int:
        return FILE_START + len(self.file)

    def begin(self, file_header: bytes = b"") -> None:
        """Invalidate the image in this slot, and write the file header of the new image."""
        self.step = NONE
        self._put(bytes(HEADER_BYTES), 0)
        if file_header:
            self._put(file_header, FILE_START)

    def complete(self, text: bytes, header: Header) -> None:
        """Write the text, and then the header, which makes the image complete."""
        self._put(text, self.text_start)
        self._put(header.packed(), 0)
        self.step = header.name.step

    def _put(self, data: bytes, at: int) -> None:
        if os.pwrite(self._descriptor, data, self._start + at) != len(data):
            raise OSError(f"{len(data):,} bytes of an image in memory were not written")


class ImageMemory:
    def __init__(self) -> None:
        self.descriptor = os.memfd_create("lockstep-image")
        os.ftruncate(self.descriptor, 2 * SLOT_BYTES)
        self.slots = [Slot(self.descriptor, number) for number in range(2)]

    @property
    def newest(self) -> int:
        return max(slot.step for slot in self.slots)

    def oldest_but(self, step: int) -> Slot:
        """Return the slot with the older image, which is overwritten next. Never return the slot
        with the image of `step`."""
        free = (slot for slot in self.slots if slot.step != step or step == NONE)
        return min(free, key=lambda slot: slot.step)

    def allocate(self, file_bytes: int) -> None:
        for slot in self.slots:
            slot.allocate(file_bytes)

    def close(self) -> None:
        """Other processes may still hold the memory's descriptor."""
        self.slots = []
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of an image, complete and mapped into memory."""

    header: Header
    memory: mmap.mmap

    @property
    def text(self) -> bytes:
        return self.memory[self.header.text_start :]

    @property
    def file(self) -> Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8)[FILE_START : self.header.text_start]


def parts_in(path: str) -> list[Part]:
    """Map the complete images of one rank's memory. Raises `OSError`."""
    parts = []
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for start in (0, SLOT_BYTES):
            header = Header.read(os.pread(descriptor, HEADER_BYTES, start))
            if header is not None:
                size = header.text_start + header.text_bytes
                # ACCESS_COPY, because torch warns of read-only memory
                copied = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY, offset=start)
                parts.append(Part(header, copied))
    finally:
        os.close(descriptor)
    return parts


class Images:
    """The in-memory checkpoints ("images") that are readable: each part is readable on some
    rank."""

    def __init__(self, parts: Sequence[Part], world: World) -> None:
        """Every rank creates `Images` from the parts that it can read, after all ranks that wrote
        images have ended."""
        self._world = world
        self._mine: dict[tuple[CheckpointName, int], dict[int, Part]] = {}
        for part in parts:
            self._mine.setdefault((part.header.name, part.header.size), {})[part.header.rank] = part
        seen = sorted(
            [name.step, name.attempt, size, sorted(ranks)]
            for (name, size), ranks in self._mine.items()
        )
        seers: dict[tuple[CheckpointName, int], dict[int, list[int]]] = {}
        for seer, theirs in enumerate(world.gather_values(seen)):
            for step, attempt, size, ranks in theirs:
                by_rank = seers.setdefault((CheckpointName(step, attempt), size), {})
                for rank in ranks:
                    by_rank.setdefault(rank, []).append(seer)
        self._complete = {
            name: [ranks[rank] for rank in range(size)]
            for (name, size), ranks in sorted(seers.items())
            if len(ranks) == size
        }
        """The ranks that can read each part of each image."""

    @property
    def names(self) -> list[CheckpointName]:
        return list(self._complete)

    @property
    def newest(self) -> CheckpointName | None:
        return max(self._complete, default=None)

    def reader(self, name: CheckpointName) -> ImageReader:
        """Every rank must call this method with the same name."""
        seers = self._complete[name]
        return ImageReader(name, self._mine.get((name, len(seers)), {}), seers, self._world)


class ImageReader:
    """Reads the training state of one image into the tensors of this rank."""

    def __init__(
        self,
        name: CheckpointName,
        mine: Mapping[int, Part],
        seers: Sequence[Sequence[int]],
        world: World,
    ) -> None:
        sources = {rank: by[0] for rank, by in enumerate(seers) if len(by) != world.size}
        texts = {rank: json.loads(part.text) for rank, part in mine.items()}
        if sources:
            sent = [[rank, texts[rank]] for rank, by in sources.items() if by == world.rank]
            for theirs in world.gather_values(sent):
                texts.update(theirs)
        in_order = [texts[rank] for rank in sorted(texts)]
        self.name = name
        self.manifest = Manifest(
            step=name.step,
            files={},
            values=merge_objects([text["values"] for text in in_order]),
            metadata=in_order[0]["metadata"],
        )
        self._saved: dict[TensorShard, int | None] = {}
        """The rank that sends each shard. None if all ranks can read the shard."""
        self._seen: dict[TensorShard, Tensor] = {}
        for rank, text in enumerate(in_order):
            file = mine[rank].file if rank in mine else None
            for *described, start in text["shards"]:
                shard = TensorShard.from_json(described)
                self._saved[shard] = sources.get(rank)
                if file is not None:
                    data = file[start : start + shard.bytes].view(torch_dtype(shard.dtype))
                    self._seen[shard] = data.view(shard.lengths)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {shard.name: (shard.dtype, shard.shape) for shard in self._saved}

    @torch.no_grad()
    def load_into(self, state: Mapping[str, Tensor], world: World) -> None:
        """The image must contain all tensors of `state`, with the same shapes. Every rank must call
        this method. Ranks send each other the shards that some rank cannot read."""
        copies = copies_by_shard(state, list(self._saved))
        for shard, targets in copies.items():
            if shard in self._seen:
                _take(state, targets, self._seen[shard])
        sent = {shard: source for shard, source in self._saved.items() if source is not None}
        if not sent:
            return
        lacked = torch.tensor(
            [[shard in copies and shard not in self._seen for shard in sent]], dtype=torch.uint8
        )
        is_lacked = world.gather_rows(lacked, [1] * world.size).any(0)
        for (shard, source), some_lack_it in zip(sent.items(), is_lacked.tolist(), strict=True):
            if not some_lack_it:
                continue
            values = (
                self._seen[shard]
                if world.rank == source
                else torch.empty(shard.lengths, dtype=torch_dtype(shard.dtype))
            )
            world.broadcast(values.reshape(-1).view(torch.uint8), source)
            if shard not in self._seen:
                _take(state, copies.get(shard, ()), values)


def open_images(paths: Sequence[str], world: World) -> Images:
    """Open images at paths such as /proc/4711/fd/12. Every rank must call this function. Raises
    `OSError`."""
    return Images([part for path in paths for part in parts_in(path)], world)


def _take(state: Mapping[str, Tensor], copies: Sequence[ShardCopy], values: Tensor) -> None:
    for copy in copies:
        fill(to_local(state[copy.shard.name]).detach()[copy.target], values[copy.source])
