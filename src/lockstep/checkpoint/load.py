"""Loads and reshards a checkpoint. Each rank verifies the blocks that it needs, and a share of the
blocks that no rank needs. If a file and a tensor have the same layout, bytes are read directly into
the tensor and hashed there. If the layouts differ, the bytes are read through a buffer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.base.dtypes import TensorSpec, torch_dtype
from lockstep.checkpoint.manifest import (
    BLOCK_BYTES,
    BlockHashes,
    UnreadableError,
    read_block,
    read_manifest,
)
from lockstep.checkpoint.storage import CheckpointName, Storage
from lockstep.checkpoint.tensor_shards import (
    ShardCopy,
    TensorShard,
    plan_copies,
)
from lockstep.comm.agreed_errors import raise_on_all_ranks
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World

T = TypeVar("T")
SMALL_BYTES = 64 << 10
"""Parts of a file below this size are read through a buffer."""


class _Span:
    """The smallest range of bytes of a saved shard that contains all elements that this rank
    loads."""

    def __init__(
        self, shard: TensorShard, at: int, wanted: Sequence[ShardCopy], state: Mapping[str, Tensor]
    ) -> None:
        self._dtype = torch_dtype(shard.dtype)
        self._strides = [math.prod(shard.lengths[dim + 1 :]) for dim in range(len(shard.lengths))]
        self._wanted = wanted
        self._target = to_local(state[shard.name]).detach()
        ends = [self._ends(copy) for copy in wanted]
        self._first, last = min(first for first, _ in ends), max(last for _, last in ends)
        self.start = at + self._first * self._dtype.itemsize
        self.stop = at + last * self._dtype.itemsize
        self.own = self._in_place(last - self._first)
        self._data = self.own

    def _ends(self, copy: ShardCopy) -> tuple[int, int]:
        sides = list(zip(copy.source, self._strides, strict=True))
        first = sum(side.start * stride for side, stride in sides)
        return first, 1 + sum((side.stop - 1) * stride for side, stride in sides)

    def _in_place(self, elements: int) -> Tensor | None:
        """Return the memory of the tensor to load, if bytes can be read directly into the
        memory."""
        part = self._target[self._wanted[0].target]
        fits = (
            len(self._wanted) == 1
            and part.is_contiguous()
            and part.numel() == elements
            and part.dtype == self._dtype
            and not part.is_conj()
            and not part.is_neg()
            and part.device.type == "cpu"
            and part.nbytes >= SMALL_BYTES
        )
        return part.view(-1).view(torch.uint8) if fits else None

    @property
    def data(self) -> Tensor:
        if self._data is None:
            self._data = torch.empty(self.stop - self.start, dtype=torch.uint8)
        return self._data

    def finish(self) -> None:
        """Call this method once all bytes are read."""
        if self.own is None:
            values = self.data.view(self._dtype)
            for copy in self._wanted:
                lengths = [side.stop - side.start for side in copy.source]
                at = self._ends(copy)[0] - self._first
                source = torch.as_strided(values, lengths, self._strides, at)
                fill(self._target[copy.target], source)
        self._data = None


@dataclass(slots=True)
class _Block:
    file: str
    hashes: BlockHashes
    number: int
    spans: list[_Span]
    """The ranges that overlap this block, in the order of the file."""


class CheckpointReader:
    def __init__(self, folder: Storage, name: CheckpointName) -> None:
        self._folder = folder
        self._name = name
        self.manifest = read_manifest(folder, name)
        self._locations = {
            shard: (file, start)
            for file, entry in self.manifest.files.items()
            for shard, start in entry.shards.items()
        }
        """The file of each shard, and the shard's first byte in the file."""
        self._spare: list[bytearray] = []

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {shard.name: (shard.dtype, shard.shape) for shard in self._locations}

    @torch.no_grad()
    def load_into(self, state: Mapping[str, Tensor], world: World) -> None:
        """The checkpoint must contain all tensors of `state`, with the same shapes. Every rank must
        call this method. If any rank raises `UnreadableError`, all ranks raise it. After an
        `UnreadableError`, the state is partly loaded."""
        blocks = list(self._blocks(state))
        done: dict[str, list[int]] = {file: [] for file in self.manifest.files}
        for block in blocks:
            done[block.file].append(block.number)
        raise_on_all_ranks(world, lambda: self._read_all(blocks), UnreadableError)
        everyone = world.gather_values({file: _ranges(numbers) for file, numbers in done.items()})
        rest = self._rest(everyone, world)
        raise_on_all_ranks(world, lambda: self._read_all(rest), UnreadableError)
        self._spare.clear()

    def _blocks(self, state: Mapping[str, Tensor]) -> Iterator[_Block]:
        spans: dict[str, list[_Span]] = {file: [] for file in self.manifest.files}
        for shard, several in copies_by_shard(state, list(self._locations)).items():
            file, at = self._locations[shard]
            spans[file].append(_Span(shard, at, several, state))
        for file, here in spans.items():
            hashes = self.manifest.files[file].hashes
            blocks: dict[int, _Block] = {}
            for span in sorted(here, key=lambda span: span.start):
                for number in hashes.covering(span.start, span.stop):
                    blocks.setdefault(number, _Block(file, hashes, number, [])).spans.append(span)
            yield from blocks.values()

    def _rest(
        self, everyone: Sequence[Mapping[str, Sequence[Sequence[int]]]], world: World
    ) -> Iterator[_Block]:
        """Yield this rank's share of the blocks that no rank needs."""
        for file, entry in self.manifest.files.items():
            done: set[int] = set()
            for ranges in everyone:
                done.update(*(range(*ends) for ends in ranges[file]))
            rest = [block for block in range(len(entry.hashes.blocks)) if block not in done]
            for number in rest[world.rank :: world.size]:
                yield _Block(file, entry.hashes, number, [])

    def _read_all(self, blocks: Iterable[_Block]) -> None:
        with ThreadPoolExecutor(self._folder.readers) as threads:
            ahead: deque[tuple[_Block, Future[None]]] = deque()

            def finish() -> None:
                block, reading = ahead.popleft()
                reading.result()
                for span in block.spans:
                    if span.stop <= block.hashes.span(block.number)[1]:
                        span.finish()

            for block in blocks:
                if len(ahead) == 2 * self._folder.readers:
                    finish()
                data = [span.data for span in block.spans]
                ahead.append((block, threads.submit(self._read, block, data)))
            while ahead:
                finish()

    def _read(self, block: _Block, data: Sequence[Tensor]) -> None:
        start, stop = block.hashes.span(block.number)
        try:
            spare = self._spare.pop()
        except IndexError:  # checking first that a buffer is left would race with another thread
            spare = bytearray(BLOCK_BYTES)
        other = memoryview(spare)[: stop - start]
        bytes_ = torch.frombuffer(spare, dtype=torch.uint8)
        parts, at, through = [], start, []
        for span, target in zip(block.spans, data, strict=True):
            first, last = max(start, span.start), min(stop, span.stop)
            part = target[first - span.start : last - span.start]
            if span.own is None:
                through.append((part, bytes_[first - start : last - start]))
            else:
                parts += [other[at - start : first - start], part.numpy().data]
                at = last
        parts.append(other[at - start :])
        parts = [part for part in parts if part]
        read_block(self._folder, self._name, block.file, block.hashes, block.number, parts)
        for part, source in through:
            part.copy_(source)
        self._spare.append(spare)


def copies_by_shard(
    state: Mapping[str, Tensor], saved: Sequence[TensorShard]
) -> dict[TensorShard, list[ShardCopy]]:
    copies: dict[TensorShard, list[ShardCopy]] = {}
    for copy in plan_copies(state, saved):
        if math.prod(copy.shard.lengths):
            copies.setdefault(copy.shard, []).append(copy)
    return copies


def fill(target: Tensor, source: Tensor) -> None:
    """`target` may be an expanded tensor."""
    for dim, stride in enumerate(target.stride()):
        # expanded: all indices share one element, which is copied once
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return ranges
