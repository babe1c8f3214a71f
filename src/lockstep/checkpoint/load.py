"""Reading a checkpoint: each rank reads and checks the blocks that its part of the state lies in; what nobody needs is checked too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.checkpoint.blocks import Seal
from lockstep.checkpoint.folder import MANIFEST, Folder, Name
from lockstep.checkpoint.manifest import Damaged, Manifest
from lockstep.checkpoint.pieces import Copy, Piece, copies, torch_dtype
from lockstep.comm.group import World
from lockstep.comm.mesh import held

THREADS = 2
"""Of a rank: one waits for the disk while the other hashes."""


@dataclass(slots=True)
class _Wanted:
    """A saved piece of which this rank needs something."""

    piece: Piece
    start: int
    """Its first byte in the file."""
    copies: list[Copy] = field(default_factory=list)
    data: Tensor | None = None
    """Its bytes, as far as they are there."""

    @property
    def stop(self) -> int:
        return self.start + self.piece.bytes


class Reader:
    """One checkpoint, for one rank."""

    def __init__(self, folder: Folder, name: Name) -> None:
        """Raises `Damaged`, `Unreadable`."""
        self._folder = folder
        self._name = name
        self.manifest = Manifest.decode(_or_damaged(lambda: folder.read(name, MANIFEST)))
        self.places: dict[Piece, tuple[str, int]] = {}
        """Of each piece, its file and its first byte there."""
        for file, entry in self.manifest.files.items():
            for place in entry.places:
                self.places[Piece.read(place.piece)] = file, place.start

    @torch.no_grad()
    def fill(self, state: Mapping[str, Tensor], world: World) -> None:
        """Give this rank's part of the state its saved values. Every rank calls it, and each raises `Damaged` where any rank found damage.

        The names and shapes are among the saved ones. What is filled by then is of no use where it raises.
        """
        failure, checked = None, {}
        try:
            checked = self._fill(state)
        except Damaged as error:
            failure = str(error)
        everyone = world.gather_values([failure, {file: _ranges(blocks) for file, blocks in checked.items()}])
        failures = [failure for failure, _ in everyone if failure is not None]
        if not failures:
            failures = [each for each in world.gather_values(self._check_rest([said for _, said in everyone], world)) if each is not None]
        if failures:
            raise Damaged(failures[0])

    def _fill(self, state: Mapping[str, Tensor]) -> dict[str, set[int]]:
        """Returns the blocks of each file that were checked for it."""
        wanted: dict[Piece, _Wanted] = {}
        for copy in copies(state, list(self.places)):
            _, start = self.places[copy.piece]
            wanted.setdefault(copy.piece, _Wanted(copy.piece, start)).copies.append(copy)
        checked: dict[str, set[int]] = {}
        for file in self.manifest.files:
            here = sorted((each for each in wanted.values() if self.places[each.piece][0] == file), key=lambda each: each.start)
            checked[file] = self._fill_from(file, here, state)
        return checked

    def _fill_from(self, file: str, wanted: Sequence[_Wanted], state: Mapping[str, Tensor]) -> set[int]:
        seal = self.manifest.files[file].seal
        blocks = sorted({block for each in wanted for block in seal.covering(each.start, each.stop)})
        waiting, open_ = list(reversed(wanted)), list[_Wanted]()
        for block, data in self._checked(file, seal, blocks):
            start, stop = seal.span(block)
            while waiting and waiting[-1].start < stop:
                open_.append(waiting.pop())
            for each in open_:
                if each.data is None:
                    each.data = torch.empty(each.piece.bytes, dtype=torch.uint8)
                first, last = max(start, each.start), min(stop, each.stop)
                each.data[first - each.start : last - each.start] = data[first - start : last - start]
                if last == each.stop:
                    _scatter(each, state)
            open_ = [each for each in open_ if each.stop > stop]
        return set(blocks)

    def _checked(self, file: str, seal: Seal, blocks: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """The blocks' bytes, in order. Raises `Damaged`."""

        def read(block: int) -> bytes:
            data = _or_damaged(lambda: self._folder.read(self._name, file, *seal.span(block)))
            if not seal.is_right(block, data):
                start, stop = seal.span(block)
                said = "ends too early" if len(data) < stop - start else f"has other bytes than were written between {start} and {stop}"
                raise Damaged(f"{file} {said}")
            return data

        with ThreadPoolExecutor(THREADS) as threads:
            ahead = [threads.submit(read, block) for block in blocks[: 2 * THREADS]]
            for number, block in enumerate(blocks):
                data = ahead.pop(0).result()
                if number + 2 * THREADS < len(blocks):
                    ahead.append(threads.submit(read, blocks[number + 2 * THREADS]))
                yield block, torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _check_rest(self, everyone: Sequence[Mapping[str, Sequence[Sequence[int]]]], world: World) -> str | None:
        """Check this rank's share of the blocks that no rank has checked. Returns what is damaged."""
        try:
            for file, entry in self.manifest.files.items():
                done = {block for said in everyone for start, stop in said[file] for block in range(start, stop)}
                rest = [block for block in range(len(entry.seal.blocks)) if block not in done]
                for _ in self._checked(file, entry.seal, rest[world.rank :: world.size]):
                    pass
        except Damaged as error:
            return str(error)
        return None


def _scatter(wanted: _Wanted, state: Mapping[str, Tensor]) -> None:
    assert wanted.data is not None
    values = wanted.data.view(torch_dtype(wanted.piece.dtype)).view(wanted.piece.lengths)
    for copy in wanted.copies:
        held(state[wanted.piece.name])[copy.target].copy_(values[copy.source])
    wanted.data = None


def _ranges(blocks: set[int]) -> list[list[int]]:
    """Whole numbers as spans [start, stop)."""
    found: list[list[int]] = []
    for block in sorted(blocks):
        if found and found[-1][1] == block:
            found[-1][1] += 1
        else:
            found.append([block, block + 1])
    return found


def _or_damaged(read: Callable[[], bytes]) -> bytes:
    try:
        return read()
    except FileNotFoundError as error:
        raise Damaged(f"{error.filename} is missing") from error
