"""A model's tensors in files, whole, one at a time, each byte checked: for whoever has no model to put them into. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from lockstep.checkpoint.file_layout import DTYPES
from lockstep.checkpoint.folder import Name, Storage
from lockstep.checkpoint.manifest import Damaged
from lockstep.checkpoint.pieces import Piece, item_bytes
from lockstep.checkpoint.reading import read_block, read_manifest

_BLOCKS = 8
"""Kept in memory: many small tensors lie in one."""


class Model(Protocol):
    """A state dict in files."""

    @property
    def kinds(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Of each tensor, tied ones under each of their names: its dtype, as torch calls it, and its shape."""

    def read(self, name: str) -> memoryview:
        """A tensor's bytes, row-major. Raises `Damaged`, `Unreachable`."""


class Stored:
    """One checkpoint."""

    def __init__(self, folder: Storage, name: Name) -> None:
        """Raises `Damaged`, `Unreadable`, `Unreachable`."""
        self._folder = folder
        self._name = name
        self.manifest = read_manifest(folder, name)
        self._pieces: dict[str, dict[str, tuple[Piece, str, int]]] = {}
        for file, entry in self.manifest.files.items():
            for place in entry.places:
                piece = Piece.read(place.piece)
                self._pieces.setdefault(piece.name, {})[piece.key] = piece, file, place.start
        self._block = lru_cache(_BLOCKS)(self._read_block)

    @property
    def pairs(self) -> list[int]:
        """The numbers of the (model, optimizer) pairs."""
        return sorted(map(int, self.manifest.values["models"]))

    def model(self, pair: int) -> StoredModel:
        """One pair's model."""
        return StoredModel(self, pair)

    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Of each tensor its dtype and shape."""
        firsts = {name: next(iter(pieces.values()))[0] for name, pieces in self._pieces.items()}
        return {name: (piece.dtype, piece.shape) for name, piece in firsts.items()}

    def read(self, name: str) -> memoryview:
        """See `Model.read`."""
        pieces = list(self._pieces[name].values())
        dtype, shape = pieces[0][0].dtype, pieces[0][0].shape
        if sum(math.prod(piece.lengths) for piece, _, _ in pieces) != math.prod(shape):
            raise Damaged(f"the parts of {name} are not the whole of it")
        whole = np.empty((*shape, item_bytes(dtype)), np.uint8)
        for piece, file, start in pieces:
            box = tuple(slice(at, at + length) for at, length in zip(piece.offsets, piece.lengths, strict=True))
            if piece.lengths == shape:
                self._into(whole.reshape(-1).data, file, start)
            else:
                part = np.empty((*piece.lengths, item_bytes(dtype)), np.uint8)
                self._into(part.reshape(-1).data, file, start)
                whole[box] = part
        return whole.reshape(-1).data

    def _into(self, target: memoryview, file: str, start: int) -> None:
        """Bring a file's bytes from `start` on into memory."""
        seal = self.manifest.files[file].seal
        stop = start + len(target)
        for number in seal.covering(start, stop):
            first, last = seal.span(number)
            begin, end = max(first, start), min(last, stop)
            target[begin - start : end - start] = self._block(file, number)[begin - first : end - first]

    def _read_block(self, file: str, number: int) -> memoryview:
        seal = self.manifest.files[file].seal
        start, stop = seal.span(number)
        block = memoryview(bytearray(stop - start))
        read_block(self._folder, self._name, file, seal, number, [block])
        return block


class StoredModel:
    """A `Model` in a checkpoint."""

    def __init__(self, stored: Stored, pair: int) -> None:
        self._stored = stored
        prefix = f"{pair}/model/"
        kinds = stored.kinds()
        self._names = {name.removeprefix(prefix): name for name in kinds if name.startswith(prefix)}
        tied: Mapping[str, str] = stored.manifest.values["models"][str(pair)]["tied"]
        self._names |= {other: self._names[first] for other, first in tied.items()}
        self.kinds = {name: kinds[saved] for name, saved in self._names.items()}

    def read(self, name: str) -> memoryview:
        return self._stored.read(self._names[name])


class SavedModel:
    """A `Model` in one safetensors file. Its bytes are not checked: nothing in it says what they were."""

    def __init__(self, path: Path) -> None:
        """Raises `Damaged`, `OSError`."""
        self._path = path
        torchs = {theirs: ours for ours, theirs in DTYPES.items()}
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(length))
                self._places = {name: said["data_offsets"] for name, said in header.items() if name != "__metadata__"}
                self.kinds = {name: (torchs[header[name]["dtype"]], tuple(header[name]["shape"])) for name in self._places}
            except (ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as error:
                raise Damaged(f"{path.name} is no safetensors file: {error}") from error
        self._start = 8 + length

    def read(self, name: str) -> memoryview:
        start, stop = self._places[name]
        with self._path.open("rb") as file:
            file.seek(self._start + start)
            data = file.read(stop - start)
        if len(data) < stop - start:
            raise Damaged(f"{self._path.name} ends too early")
        return memoryview(data)
