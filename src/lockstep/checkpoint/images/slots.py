"""The memory for the images of one rank: two slots, one of which is always complete. The memory has
no name. It lives as long as any process holds its descriptor. A slot is, from a multiple of
`SLOT_BYTES` on:

    header           step, attempt, rank and number of ranks, position of the text; zeros
                     until all else is written
    file             the rank's file of a checkpoint (safetensors)
    text             JSON: positions of the shards, values, metadata

A write first removes the header of its slot, and writes a new one last. So a killed process leaves
the other slot intact. Nothing is hashed: memory is not a disk. Linux only.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.checkpoint.storage import CheckpointName

SLOT_BYTES = 1 << 40
"""Distance of the two slots: more than any rank's part. Unwritten pages take no memory."""
FILE_START = mmap.ALLOCATIONGRANULARITY
NONE = -1
"""The step of an incomplete slot."""
_MAGIC = b"lockstp1"
_HEADER = struct.Struct("<8s8sQIIQQ")
_SUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _SUM.size


@dataclass(frozen=True, slots=True)
class Header:
    """The identity of an image, and where its text is."""

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
        """None if `data` is no whole header."""
        packed = data[: _HEADER.size]
        if not packed.startswith(_MAGIC) or _SUM.pack(zlib.crc32(packed)) != data[_HEADER.size :]:
            return None
        _, attempt, step, rank, size, text_start, text_bytes = _HEADER.unpack(packed)
        return cls(CheckpointName(step, attempt.decode()), rank, size, text_start, text_bytes)


class Slot:
    """One of the two images."""

    def __init__(self, descriptor: int, number: int) -> None:
        self._descriptor = descriptor
        self._start = number * SLOT_BYTES
        self.step = NONE
        """Step of the complete image; `NONE` if it is not complete."""
        self.file = torch.empty(0, dtype=torch.uint8)
        """Mapped bytes of the file."""

    def allocate(self, file_bytes: int) -> None:
        """Allocate memory; the image that is there stays. Raises `OSError`."""
        size = FILE_START + file_bytes
        self.file = torch.empty(0, dtype=torch.uint8)
        # it raises here; a first access would end the process
        os.posix_fallocate(self._descriptor, self._start, size)
        # page faults make the first write several times slower than later ones
        populated = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = mmap.mmap(self._descriptor, size, flags=populated, offset=self._start)
        self.file = torch.frombuffer(memory, dtype=torch.uint8, offset=FILE_START)

    @property
    def text_start(self) -> int:
        return FILE_START + len(self.file)

    def begin(self) -> None:
        """Invalidate the image."""
        self.step = NONE
        self._put(bytes(HEADER_BYTES), 0)

    def put_file(self, data: bytes) -> None:
        self._put(data, FILE_START)

    def complete(self, text: bytes, header: Header) -> None:
        """Write the text, then the header."""
        self._put(text, self.text_start)
        self._put(header.packed(), 0)
        self.step = header.name.step

    def _put(self, data: bytes, at: int) -> None:
        if os.pwrite(self._descriptor, data, self._start + at) != len(data):
            raise OSError(f"{len(data):,} bytes of an image in memory were not written")


class ImageMemory:
    """Two slots, used in turn: while one is written, the other is complete."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("lockstep-image")
        os.ftruncate(self.descriptor, 2 * SLOT_BYTES)
        self.slots = [Slot(self.descriptor, number) for number in range(2)]

    @property
    def newest(self) -> int:
        """Step of the newest image."""
        return max(slot.step for slot in self.slots)

    def oldest_but(self, step: int) -> Slot:
        """Return the slot with the older image, which is never that of `step`."""
        return min(
            (slot for slot in self.slots if slot.step != step or step == NONE),
            key=lambda slot: slot.step,
        )

    def allocate(self, file_bytes: int) -> None:
        """Allocate memory for files of this size in both slots. Raises `OSError`."""
        for slot in self.slots:
            slot.allocate(file_bytes)

    def close(self) -> None:
        """Release the memory here; others may hold its descriptor."""
        self.slots = []
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Part:
    """A complete image of one rank, mapped."""

    header: Header
    memory: mmap.mmap

    @property
    def text(self) -> bytes:
        return self.memory[self.header.text_start :]

    @property
    def file(self) -> Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8)[FILE_START : self.header.text_start]


def parts_in(path: str) -> list[Part]:
    """Map the complete images behind `path`. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = [_part(descriptor, number * SLOT_BYTES) for number in range(2)]
    finally:
        os.close(descriptor)
    return [part for part in found if part is not None]


def _part(descriptor: int, start: int) -> Part | None:
    """Map a slot; None if it is not complete."""
    header = Header.read(os.pread(descriptor, HEADER_BYTES, start))
    if header is None:
        return None
    size = header.text_start + header.text_bytes
    # torch warns of read-only memory
    return Part(header, mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY, offset=start))
