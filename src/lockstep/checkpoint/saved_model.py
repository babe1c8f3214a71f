"""Reads a saved model tensor by tensor, without building the model or torch, for `lockstep inspect` and `export`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from lockstep.checkpoint.integrity import read_block, read_manifest
from lockstep.checkpoint.manifest import DamagedError
from lockstep.checkpoint.storage import CheckpointName, Storage
from lockstep.checkpoint.tensor_shards import DTYPES, TensorShard, item_bytes

_BLOCKS = 8
"""Blocks kept in memory, because one block may hold many small tensors."""


@dataclass(frozen=True, slots=True)
class StateDictReader:
    """Reads a saved state dict."""

    specs: Mapping[str, tuple[str, tuple[int, ...]]]
    """Name -> torch's name of the dtype, and shape. Tied tensors are listed under each of their names."""
    read: Callable[[str], memoryview]
    """Reads the bytes of a tensor, row-major. Raises `DamagedError`, `UnreachableError`."""


class StoredCheckpoint:
    """One checkpoint. Every byte is verified when it is read."""

    def __init__(self, folder: Storage, name: CheckpointName) -> None:
        """Raises `DamagedError`, `UnknownFormatError`, `UnreachableError`."""
        self._folder = folder
        self._name = name
        self.manifest = read_manifest(folder, name)
        self._shards: dict[str, dict[str, tuple[TensorShard, str, int]]] = {}
        for file, entry in self.manifest.files.items():
            for shard, start in entry.shards.items():
                self._shards.setdefault(shard.name, {})[shard.key] = shard, file, start
        self._block = lru_cache(_BLOCKS)(self._read_block)

    @property
    def modules(self) -> list[int]:
        """The indices of the saved models, in the order in which they were prepared."""
        return sorted(map(int, self.manifest.values["modules"]))

    def model(self, module: int) -> StateDictReader:
        """The saved model with this index."""
        prefix, specs = f"{module}/model/", self.specs()
        names = {name.removeprefix(prefix): name for name in specs if name.startswith(prefix)}
        tied: Mapping[str, str] = self.manifest.values["modules"][str(module)]["tied"]
        names |= {other: names[first] for other, first in tied.items()}
        return StateDictReader({name: specs[saved] for name, saved in names.items()}, lambda name: self.read(names[name]))

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> dtype and shape of each saved tensor."""
        firsts = {name: next(iter(shards.values()))[0] for name, shards in self._shards.items()}
        return {name: (shard.dtype, shard.shape) for name, shard in firsts.items()}

    def read(self, name: str) -> memoryview:
        """Read the bytes of a tensor, row-major. Raises `DamagedError`, `UnreachableError`."""
        shards = list(self._shards[name].values())
        dtype, shape = shards[0][0].dtype, shards[0][0].shape
        if sum(math.prod(shard.lengths) for shard, _, _ in shards) != math.prod(shape):
            raise DamagedError(f"the shards of {name} do not cover it")
        whole = np.empty((*shape, item_bytes(dtype)), np.uint8)
        for shard, file, start in shards:
            box = tuple(slice(at, at + length) for at, length in zip(shard.offsets, shard.lengths, strict=True))
            if shard.lengths == shape:
                self._into(whole.reshape(-1).data, file, start)
            else:
                part = np.empty((*shard.lengths, item_bytes(dtype)), np.uint8)
                self._into(part.reshape(-1).data, file, start)
                whole[box] = part
        return whole.reshape(-1).data

    def _into(self, target: memoryview, file: str, start: int) -> None:
        """Copy a file's bytes from `start` on into `target`."""
        hashes = self.manifest.files[file].hashes
        stop = start + len(target)
        for number in hashes.covering(start, stop):
            first, last = hashes.span(number)
            begin, end = max(first, start), min(last, stop)
            target[begin - start : end - start] = self._block(file, number)[begin - first : end - first]

    def _read_block(self, file: str, number: int) -> memoryview:
        hashes = self.manifest.files[file].hashes
        start, stop = hashes.span(number)
        block = memoryview(bytearray(stop - start))
        read_block(self._folder, self._name, file, hashes, number, [block])
        return block


def read_safetensors(path: Path) -> StateDictReader:
    """Open a safetensors file; the format has no hashes to verify its bytes with. Raises `DamagedError`, `OSError`."""
    torchs = {theirs: ours for ours, theirs in DTYPES.items()}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length))
            offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
            specs = {name: (torchs[header[name]["dtype"]], tuple(header[name]["shape"])) for name in offsets}
        except (ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as error:
            raise DamagedError(f"{path.name} is not a safetensors file: {error}") from error

    def read(name: str) -> memoryview:
        start, stop = offsets[name]
        with path.open("rb") as file:
            file.seek(8 + length + start)
            data = file.read(stop - start)
        if len(data) < stop - start:
            raise DamagedError(f"{path.name} ends too early")
        return memoryview(data)

    return StateDictReader(specs, read)
