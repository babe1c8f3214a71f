"""Images of the state in memory: every few steps each rank copies its part, and the copy outlives
the rank.

The launcher holds each rank's memory through `/proc/<process>/fd/<descriptor>`. After a loss, all
ranks of the next start load from the images of all old ranks, under any plan. Two slots take twice
the bytes of this rank's part; a tensor of several ranks is in one part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.base.errors import CheckpointError
from lockstep.base.system import require_linux
from lockstep.base.torch_private import is_distributed
from lockstep.checkpoint.images.buddies import Buddies
from lockstep.checkpoint.images.slots import FILE_START, Header, ImageMemory, Slot
from lockstep.checkpoint.manifest import JsonObject
from lockstep.checkpoint.saver import MappedShards, assign_to_this_rank
from lockstep.checkpoint.storage import CheckpointName
from lockstep.checkpoint.tensor_shards import FileLayout, local_shards
from lockstep.comm.world import World


class ImageWriter:
    """Writes this rank's images. Every rank makes one, and calls `prepare` and `write` alike."""

    def __init__(self, world: World, attempt: str, metadata: JsonObject) -> None:
        """`attempt`: see `CheckpointName`; another one for each start that repeats steps.
        `metadata`: JSON of rank 0."""
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
        """Seconds that the last write waited for the network."""

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of this rank's memory, and of what it keeps for other hosts."""
        return [self._memory.descriptor, *self._buddies.descriptors]

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Plan who copies what and allocate memory, unless the layout is as before. Every rank
        calls it, or leaves it to the first `write`. If one rank has no memory, all raise
        `CheckpointError`."""
        self._agree(tensors, ())

    def write(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        values: JsonObject,
        figures: Sequence[float] = (),
    ) -> list[float]:
        """Copy the state after `step` steps, more than the last time. Every rank calls it.

        `tensors`: this rank's. `values`: JSON; the reader merges all ranks'. After an error, the
        newest image that all ranks have is still complete. Returns the largest of all ranks'
        `figures`, which travel with what is exchanged anyway.
        """
        common, largest = self._agree(tensors, figures)
        slot = self._memory.oldest_but(common)
        assert self._layout is not None
        text = b'{%b,"values":%b}' % (
            self._described,
            json.dumps(values, separators=(",", ":")).encode(),
        )
        slot.begin()
        slot.put_file(self._layout.header)
        self._shards[slot].copy(tensors)
        header = Header(
            CheckpointName(step, self._attempt),
            self._world.rank,
            self._world.size,
            slot.text_start,
            len(text),
        )
        slot.complete(text, header)
        self.sending_seconds = self._buddies.exchange(slot, text, header, common)
        return largest

    def close(self) -> None:
        """Release the memory here; others may hold its descriptor."""
        self._shards, self._last = {}, {}
        self._memory.close()
        self._buddies.close()

    def _agree(
        self, tensors: Mapping[str, Tensor], figures: Sequence[float]
    ) -> tuple[int, list[float]]:
        """Plan again if the layout changed on any rank. Returns the newest step whose image all
        ranks have, over which no rank writes, and the largest figures."""
        kinds = self._kinds_of(tensors)
        newest = min([self._memory.newest, *self._buddies.newest])
        mine = torch.tensor([[kinds != self._kinds, newest, *figures]], dtype=torch.float64)
        rows = self._world.gather_rows(mine, [1] * self._world.size)
        if rows[:, 0].any():
            self._kinds = None
            self._lay_out(FileLayout(assign_to_this_rank(local_shards(tensors), self._world)))
            self._kinds = kinds
        return int(rows[:, 1].min()), rows[:, 2:].amax(0).tolist()

    def _kinds_of(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
        """Return what each shard depends on, by name; known for a tensor of the last image."""
        kinds = {
            name: (
                self._last[name][1]
                if name in self._last and self._last[name][0] is tensor
                else _kind(tensor)
            )
            for name, tensor in tensors.items()
        }
        self._last = {name: (tensor, kinds[name]) for name, tensor in tensors.items()}
        return kinds

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
        self.size_bytes = max(
            self.size_bytes, 2 * (FILE_START + layout.bytes) + self._buddies.size_bytes
        )


def image_interval(copy_seconds: float, step_seconds: float, limit: float) -> int:
    """Return the steps between images, at least 1, so that copying takes at most `limit` of the
    time. All ranks give the slowest rank's seconds."""
    return max(1, math.ceil(copy_seconds / (limit * step_seconds)))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a tensor's shard depends on: cheap to compare, where finding a DTensor's shard
    takes 100 µs."""
    place = (tensor.placements, tensor.device_mesh) if is_distributed(tensor) else ()  # type: ignore[attr-defined]
    return tensor.dtype, tensor.shape, *place
