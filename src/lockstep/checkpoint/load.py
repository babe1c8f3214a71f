"""Reading a checkpoint: each rank reads and checks the blocks that its part of the state lies in; what nobody needs is checked too.

What lies in a file as it lies in a tensor is read into the tensor itself, and hashed there. The rest goes through other memory: what is
small, what is cut otherwise, what has another dtype or is on a GPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.checkpoint.block_hashes import BLOCK_BYTES, Seal
from lockstep.checkpoint.file_layout import DTYPES
from lockstep.checkpoint.folder import Name, Storage
from lockstep.checkpoint.manifest import Damaged, Unreachable, Unreadable
from lockstep.checkpoint.pieces import Copy, Piece, copies, torch_dtype
from lockstep.checkpoint.reading import read_block, read_manifest
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World

T = TypeVar("T")
SMALL_BYTES = 64 << 10
"""Less is not read by itself."""


class _Span:
    """The bytes of a piece that this rank needs, with as few others as may be."""

    def __init__(self, piece: Piece, at: int, wanted: Sequence[Copy], state: Mapping[str, Tensor]) -> None:
        """`at`: the piece's first byte in its file."""
        self._dtype = torch_dtype(piece.dtype)
        self._strides = [math.prod(piece.lengths[dim + 1 :]) for dim in range(len(piece.lengths))]
        self._wanted = wanted
        self._target = to_local(state[piece.name]).detach()
        ends = [self._ends(copy) for copy in wanted]
        self._first, last = min(first for first, _ in ends), max(last for _, last in ends)
        self.start = at + self._first * self._dtype.itemsize
        self.stop = at + last * self._dtype.itemsize
        self.own = self._in_place(last - self._first)
        self._data = self.own

    def _ends(self, copy: Copy) -> tuple[int, int]:
        """The elements [first, last) of the piece between which the copy's lie."""
        first = sum(side.start * stride for side, stride in zip(copy.source, self._strides, strict=True))
        return first, first + 1 + sum(
            (side.stop - side.start - 1) * stride for side, stride in zip(copy.source, self._strides, strict=True)
        )

    def _in_place(self, elements: int) -> Tensor | None:
        """The target's own memory, as bytes, where what is read can go straight there."""
        part = self._target[self._wanted[0].target]
        fits = len(self._wanted) == 1 and part.is_contiguous() and part.numel() == elements and part.dtype == self._dtype
        if not fits or part.is_conj() or part.is_neg() or part.device.type != "cpu" or part.nbytes < SMALL_BYTES:
            return None
        return part.view(-1).view(torch.uint8)

    @property
    def data(self) -> Tensor:
        """Memory for the bytes."""
        if self._data is None:
            self._data = torch.empty(self.stop - self.start, dtype=torch.uint8)
        return self._data

    def finish(self) -> None:
        """Bring the bytes, all there now, where they belong."""
        if self.own is None:
            values = self.data.view(self._dtype)
            for copy in self._wanted:
                lengths = [side.stop - side.start for side in copy.source]
                source = torch.as_strided(values, lengths, self._strides, self._ends(copy)[0] - self._first)
                target = self._target[copy.target]
                for dim, stride in enumerate(target.stride()):
                    if stride == 0 and target.shape[dim] > 1:  # expanded: one place in memory, which is written to once
                        target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
                target.copy_(source)
        self._data = None


@dataclass(slots=True)
class _Block:
    file: str
    seal: Seal
    number: int
    spans: list[_Span]
    """What is needed of it, in order."""


class Reader:
    """One checkpoint, for one rank."""

    def __init__(self, folder: Storage, name: Name) -> None:
        """Raises `Damaged`, `Unreadable`, `Unreachable`."""
        self._folder = folder
        self._name = name
        self.manifest = read_manifest(folder, name)
        self.places: dict[Piece, tuple[str, int]] = {}
        """Of each piece, its file and its first byte there."""
        for file, entry in self.manifest.files.items():
            for place in entry.places:
                piece = Piece.read(place.piece)
                if piece.dtype not in DTYPES:
                    raise Damaged(f"the manifest names the type {piece.dtype!r}")
                self.places[piece] = file, place.start
        self._spare: list[bytearray] = []
        """Memory for a block, each."""

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The saved tensors by name: dtype and shape."""
        return {piece.name: (piece.dtype, piece.shape) for piece in self.places}

    @torch.no_grad()
    def fill(self, state: Mapping[str, Tensor], world: World) -> None:
        """Give this rank's part of the state its saved values. Every rank calls it, and each raises `Damaged` where any rank found damage,
        or `Unreachable` where any rank could not read.

        The names and shapes are among the saved ones. What is filled by then is of no use where it raises.
        """
        blocks = list(self._blocks(state))
        done: dict[str, list[int]] = {file: [] for file in self.manifest.files}
        for block in blocks:
            done[block.file].append(block.number)
        together(lambda: self._read_all(blocks), world)
        everyone = world.gather_values({file: _ranges(numbers) for file, numbers in done.items()})
        together(lambda: self._read_all(self._rest(everyone, world)), world)
        self._spare.clear()

    def _blocks(self, state: Mapping[str, Tensor]) -> Iterator[_Block]:
        """What this rank reads, in the order of the files."""
        wanted: dict[Piece, list[Copy]] = {}
        for copy in copies(state, list(self.places)):
            if math.prod(copy.piece.lengths):
                wanted.setdefault(copy.piece, []).append(copy)
        spans: dict[str, list[_Span]] = {file: [] for file in self.manifest.files}
        for piece, several in wanted.items():
            file, at = self.places[piece]
            spans[file].append(_Span(piece, at, several, state))
        for file, here in spans.items():
            seal = self.manifest.files[file].seal
            found: dict[int, _Block] = {}
            for span in sorted(here, key=lambda span: span.start):
                for number in seal.covering(span.start, span.stop):
                    found.setdefault(number, _Block(file, seal, number, [])).spans.append(span)
            yield from found.values()

    def _rest(self, everyone: Sequence[Mapping[str, Sequence[Sequence[int]]]], world: World) -> Iterator[_Block]:
        """This rank's share of the blocks that no rank has read."""
        for file, entry in self.manifest.files.items():
            done = {block for said in everyone for start, stop in said[file] for block in range(start, stop)}
            rest = [block for block in range(len(entry.seal.blocks)) if block not in done]
            yield from (_Block(file, entry.seal, number, []) for number in rest[world.rank :: world.size])

    def _read_all(self, blocks: Iterable[_Block]) -> None:
        """Raises `Damaged`, `Unreachable`."""
        with ThreadPoolExecutor(self._folder.readers) as threads:
            ahead: deque[tuple[_Block, Future[None]]] = deque()

            def finish() -> None:
                block, reading = ahead.popleft()
                reading.result()
                for span in block.spans:
                    if span.stop <= block.seal.span(block.number)[1]:
                        span.finish()

            for block in blocks:
                if len(ahead) == 2 * self._folder.readers:
                    finish()
                ahead.append((block, threads.submit(self._read, block, [span.data for span in block.spans])))
            while ahead:
                finish()

    def _read(self, block: _Block, data: Sequence[Tensor]) -> None:
        """Read a block, what has a place of its own into that, all else into other memory, and from there into the spans' data."""
        start, stop = block.seal.span(block.number)
        try:
            spare = self._spare.pop()
        except IndexError:  # not asked for before: another thread may take it between
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
        read_block(self._folder, self._name, block.file, block.seal, block.number, [part for part in parts if part])
        for part, source in through:
            part.copy_(source)
        self._spare.append(spare)


def together(read: Callable[[], T], world: World) -> T:
    """What `read` returns on this rank. Every rank calls it, and each raises the `Damaged`, `Unreadable` or `Unreachable` that any did."""
    failure: tuple[str, str] | None = None
    try:
        found = read()
    except (Damaged, Unreadable, Unreachable) as error:
        failure = type(error).__name__, str(error)
    failures = [each for each in world.gather_values(failure) if each is not None]
    if failures:
        kind, text = failures[0]
        raise {each.__name__: each for each in (Damaged, Unreadable, Unreachable)}[kind](text)
    return found


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Whole numbers in order as spans [start, stop)."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found
