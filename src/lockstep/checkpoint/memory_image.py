"""The image of a run's state in memory: every rank copies its part every few steps, and the copy outlives the rank.

The memory has no name. It lives as long as any process holds its descriptor, and the launcher, which opens
`/proc/<process>/fd/<descriptor>`, holds that of each rank. After a loss, all ranks of the next start load from the
images of all old ranks, that of the lost one too, under any plan.

The memory has two slots, used in turn: while one is written, the other is complete. So it takes twice the bytes of this
rank's part, which a tensor that several ranks hold is in once. A slot is, from a multiple of `SLOT_BYTES` on:

    header           step, attempt, rank and number of ranks, position of the text; zeros until all else is written
    file             this rank's file of a checkpoint (safetensors)
    text             JSON: positions of the shards, values, metadata

A write first takes away the header of its slot, and puts a header there last. Thus a process that is killed at any
moment leaves the other slot as it was. Nothing is hashed: memory is not a disk. Linux only.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.base.errors import CheckpointError
from lockstep.base.system import require_linux
from lockstep.base.torch_private import is_distributed
from lockstep.checkpoint.load import copies_by_shard, fill
from lockstep.checkpoint.manifest import JsonObject, Manifest, merge_objects
from lockstep.checkpoint.saver import MappedShards, assign_to_this_rank
from lockstep.checkpoint.storage import CheckpointName
from lockstep.checkpoint.tensor_shards import FileLayout, TensorShard, local_shards, torch_dtype
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World

SLOT_BYTES = 1 << 40
"""Distance of the two slots. More than any rank's part; pages that were never written take no memory."""
FILE_START = mmap.ALLOCATIONGRANULARITY
"""Position of the file in its slot."""
_MAGIC = b"lockstp1"
_HEADER = struct.Struct("<8s8sQIIQQ")
_SUM = struct.Struct("<I")
_NONE = -1
"""The step of a slot that is not complete."""


class ImageWriter:
    """Writes the images of this rank. Every rank makes one, and calls `prepare` and `write` alike."""

    def __init__(self, world: World, attempt: str, metadata: JsonObject) -> None:
        """`attempt`: see `CheckpointName`; the same on every rank, and another one for each start that repeats steps.
        `metadata`: JSON of rank 0."""
        require_linux("images of the state in memory")
        self._world = world
        self._attempt = attempt
        self._metadata = metadata
        self.descriptor = os.memfd_create("lockstep-image")
        os.ftruncate(self.descriptor, 2 * SLOT_BYTES)
        self._slots = [_Slot(self.descriptor, number) for number in range(2)]
        self._kinds: dict[str, tuple[Any, ...]] | None = None
        self._described = b""
        self.size_bytes = 0
        """Bytes of memory that the images take."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Plan which rank copies what, and allocate memory, unless this was done for the same layout.

        Every rank calls it. If it was not called, the first `write` does it, and takes longer than later ones. Raises
        `CheckpointError`, on every rank, if one has no memory.
        """
        self._agree(tensors)

    def write(self, step: int, tensors: Mapping[str, Tensor], values: JsonObject) -> None:
        """Copy the state after `step` steps. Every rank calls it, with more steps than the last time.

        `tensors`: this rank's; a name may exist on some ranks only. `values`: JSON; the reader merges all ranks'.
        After an error, the newest image that all ranks have is still complete.
        """
        common = self._agree(tensors)
        text = b'{%b,"values":%b}' % (self._described, json.dumps(values, separators=(",", ":")).encode())
        slot = min((slot for slot in self._slots if slot.step != common or common == _NONE), key=lambda slot: slot.step)
        slot.write(step, tensors, text, (self._attempt.encode(), step, self._world.rank, self._world.size))

    def close(self) -> None:
        """Release the memory in this process; others may hold its descriptor."""
        self._slots = []
        os.close(self.descriptor)

    def _agree(self, tensors: Mapping[str, Tensor]) -> int:
        """Plan again on all ranks if the layout changed on any. Returns the newest step whose image all ranks have.

        No rank writes over that image. A rank that gets here has ended its last write, so without errors it is the
        last one.
        """
        kinds = {name: _kind(tensor) for name, tensor in tensors.items()}
        newest = max(slot.step for slot in self._slots)
        rows = self._world.gather_rows(torch.tensor([[kinds != self._kinds, newest]]), [1] * self._world.size)
        if rows[:, 0].any():
            self._kinds = None
            self._lay_out(FileLayout(assign_to_this_rank(local_shards(tensors), self._world)))
            self._kinds = kinds
        return int(rows[:, 1].min())

    def _lay_out(self, layout: FileLayout) -> None:
        shards = [[*shard.to_json(), start] for shard, start in layout.starts.items()]
        described = {"shards": shards, "metadata": self._metadata if self._world.rank == 0 else {}}
        self._described = json.dumps(described, separators=(",", ":")).encode()[1:-1]
        error = None
        try:
            for slot in self._slots:
                slot.lay_out(layout)
        except OSError as failure:
            error = f"rank {self._world.rank} has no memory for two images of {layout.bytes:,} bytes ({failure.strerror})"
        if failures := [each for each in self._world.gather_values(error) if each is not None]:
            raise CheckpointError(f"{failures[0]}; leave the images out, or spread the state over more processes")
        self.size_bytes = max(self.size_bytes, 2 * (FILE_START + layout.bytes))


class _Slot:
    """One of the two places of an image."""

    def __init__(self, descriptor: int, number: int) -> None:
        self._descriptor = descriptor
        self._start = number * SLOT_BYTES
        self._layout: FileLayout | None = None
        self._shards: MappedShards | None = None
        self.step = _NONE

    def lay_out(self, layout: FileLayout) -> None:
        """Allocate memory for the next images. The image that is there stays as it is."""
        size = FILE_START + layout.bytes
        self._shards = None
        os.posix_fallocate(self._descriptor, self._start, size)  # it raises where a first access would end the process
        populated = mmap.MAP_SHARED | mmap.MAP_POPULATE  # page faults make the first write several times slower than later ones
        memory = mmap.mmap(self._descriptor, size, flags=populated, offset=self._start)
        self._shards, self._layout = MappedShards(layout, torch.frombuffer(memory, dtype=torch.uint8, offset=FILE_START)), layout

    def write(self, step: int, tensors: Mapping[str, Tensor], text: bytes, names: tuple[bytes, int, int, int]) -> None:
        assert self._layout is not None
        assert self._shards is not None
        text_start = FILE_START + self._layout.bytes
        header = _HEADER.pack(_MAGIC, *names, text_start, len(text))
        self.step = _NONE
        self._put(bytes(_HEADER.size + _SUM.size), 0)
        self._put(self._layout.header, FILE_START)
        self._shards.copy(tensors)
        self._put(text, text_start)
        self._put(header + _SUM.pack(zlib.crc32(header)), 0)
        self.step = step

    def _put(self, data: bytes, at: int) -> None:
        if os.pwrite(self._descriptor, data, self._start + at) != len(data):
            raise OSError(f"{len(data):,} bytes of an image in memory were not written")


@dataclass(frozen=True, slots=True)
class _Part:
    """A complete image of one rank, mapped."""

    name: CheckpointName
    rank: int
    size: int
    """Number of ranks."""
    memory: mmap.mmap
    text: slice


class Images:
    """The images that are complete on all ranks."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        found: dict[tuple[CheckpointName, int], dict[int, _Part]] = {}
        for part in parts:
            found.setdefault((part.name, part.size), {})[part.rank] = part
        self._complete = {
            name: [ranks[rank] for rank in range(size)] for (name, size), ranks in sorted(found.items()) if len(ranks) == size
        }

    @property
    def names(self) -> list[CheckpointName]:
        """Step and attempt of each, the oldest first."""
        return list(self._complete)

    @property
    def newest(self) -> CheckpointName | None:
        """The newest; None if there is none."""
        return max(self._complete, default=None)

    def reader(self, name: CheckpointName) -> ImageReader:
        """Read one of them. All ranks must read the same: let one of them choose, after all writers have stopped."""
        return ImageReader(name, self._complete[name])


class ImageReader:
    """Reads the state that all ranks' images of one step hold together, for one rank."""

    def __init__(self, name: CheckpointName, parts: Sequence[_Part]) -> None:
        texts = [json.loads(part.memory[part.text]) for part in parts]
        self.name = name
        self.manifest = Manifest(
            step=name.step, files={}, values=merge_objects([text["values"] for text in texts]), metadata=texts[0]["metadata"]
        )
        self._shards: dict[TensorShard, Tensor] = {}
        """Each shard's own memory."""
        for part, text in zip(parts, texts, strict=True):
            file = torch.frombuffer(part.memory, dtype=torch.uint8)[FILE_START : part.text.start]
            for *described, start in text["shards"]:
                shard = TensorShard.from_json(described)
                self._shards[shard] = file[start : start + shard.bytes].view(torch_dtype(shard.dtype)).view(shard.lengths)

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> dtype and shape of each saved tensor."""
        return {shard.name: (shard.dtype, shard.shape) for shard in self._shards}

    @torch.no_grad()
    def load_into(self, state: Mapping[str, Tensor], world: World) -> None:
        """Copy the values into this rank's tensors; names and shapes must be among the saved ones. Needs no other
        rank."""
        for shard, copies in copies_by_shard(state, list(self._shards)).items():
            target = to_local(state[shard.name]).detach()
            for copy in copies:
                fill(target[copy.target], self._shards[shard][copy.source])


def open_images(paths: Sequence[str]) -> Images:
    """Map the images behind `paths`, such as /proc/4711/fd/12, for reading. Raises `OSError`.

    The paths may be of several starts of a run: an image counts if those of all ranks of its start are there.
    """
    return Images([part for path in paths for part in _parts(path)])


def image_interval(copy_seconds: float, step_seconds: float, limit: float = 0.01) -> int:
    """Steps from one image to the next, at least 1, with which copying takes at most `limit` of the steps' time.

    `step_seconds`: the time of a step without a copy, more than 0. Ranks measure different times: give all of them
    those of the slowest.
    """
    return max(1, math.ceil(copy_seconds / (limit * step_seconds)))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """All that a tensor's shard depends on. To compare it takes a microsecond; to find the shard of a DTensor, 100."""
    place = (tensor.placements, tensor.device_mesh) if is_distributed(tensor) else ()  # type: ignore[attr-defined]
    return tensor.dtype, tensor.shape, *place


def _parts(path: str) -> list[_Part]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = [_part(descriptor, number * SLOT_BYTES) for number in range(2)]
    finally:
        os.close(descriptor)
    return [part for part in found if part is not None]


def _part(descriptor: int, start: int) -> _Part | None:
    """Map the slot at `start`; None if it is not complete."""
    read = os.pread(descriptor, _HEADER.size + _SUM.size, start)
    header = read[: _HEADER.size]
    if not header.startswith(_MAGIC) or _SUM.pack(zlib.crc32(header)) != read[_HEADER.size :]:
        return None
    _, attempt, step, rank, size, text_start, text_bytes = _HEADER.unpack(header)
    memory = mmap.mmap(descriptor, text_start + text_bytes, access=mmap.ACCESS_COPY, offset=start)  # torch warns of read-only memory
    return _Part(CheckpointName(step, attempt.decode()), rank, size, memory, slice(text_start, text_start + text_bytes))
