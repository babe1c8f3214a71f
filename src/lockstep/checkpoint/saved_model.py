"""Reads a saved model tensor by tensor, without torch, for `lockstep inspect` and `export`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

from lockstep.base.dtypes import TensorSpec
from lockstep.base.files import open_below, open_named, parse_object
from lockstep.base.system import signals_blocked
from lockstep.checkpoint.manifest import DamagedError, read_block, read_manifest
from lockstep.checkpoint.storage import CheckpointName, Storage
from lockstep.checkpoint.tensor_shards import (
    MOST_DIMS,
    TORCH_DTYPES,
    TensorShard,
    box_of,
    item_bytes,
    whole_number,
)

MODEL = "model.safetensors"
"""File name of the final model in a run directory."""
_MOST_HEADER_BYTES = 100_000_000
_BLOCKS = 8
"""Number of cached blocks. One block may contain many small tensors."""


@dataclass(frozen=True, slots=True)
class StateDictReader:
    specs: Mapping[str, TensorSpec]
    """Dtype and shape of each tensor. A tied tensor appears under each of its names."""
    read: Callable[[str], memoryview]
    """Reads a tensor's bytes in row-major order."""


class StoredCheckpoint:
    def __init__(self, folder: Storage, name: CheckpointName) -> None:
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
        with self._parsing():
            return sorted(map(int, self.manifest.values["modules"].keys()))

    @property
    def other_state(self) -> list[str]:
        """Names of the saved state of hooks and `session.include`."""
        with self._parsing():
            return sorted(self.manifest.values["state"].keys())

    def model(self, module: int) -> StateDictReader:
        prefix, specs = f"{module}/model/", self.specs()
        names = {name.removeprefix(prefix): name for name in specs if name.startswith(prefix)}
        with self._parsing():
            tied: Mapping[str, str] = self.manifest.values["modules"][str(module)]["tied"]
            names |= {other: names[first] for other, first in tied.items()}
            "".join(names).encode()  # half a surrogate pair is not allowed in a name
        return StateDictReader(
            {name: specs[saved] for name, saved in names.items()},
            lambda name: self.read(names[name]),
        )

    @contextmanager
    def _parsing(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(
                f"the manifest describes no models as a run does: {error!r}"
            ) from error

    def specs(self) -> dict[str, TensorSpec]:
        return {
            name: (shard.dtype, shard.shape)
            for name, shards in self._shards.items()
            for shard, *_ in shards.values()
        }

    def read(self, name: str) -> memoryview:
        with signals_blocked():  # Ctrl-C in an import may be swallowed
            import numpy as np  # 80 ms

        shards = list(self._shards[name].values())
        dtype, shape = shards[0][0].dtype, shards[0][0].shape
        whole = np.empty((*shape, item_bytes(dtype)), np.uint8)
        for shard, file, start in shards:
            if shard.lengths == shape:
                self._into(whole.reshape(-1).data, file, start)
            else:
                part = np.empty((*shard.lengths, item_bytes(dtype)), np.uint8)
                self._into(part.reshape(-1).data, file, start)
                whole[box_of(shard.offsets, shard.lengths)] = part
        return whole.reshape(-1).data

    def _into(self, target: memoryview, file: str, start: int) -> None:
        hashes = self.manifest.files[file].hashes
        stop = start + len(target)
        for number in hashes.covering(start, stop):
            first, last = hashes.span(number)
            begin, end = max(first, start), min(last, stop)
            block = self._block(file, number)
            target[begin - start : end - start] = block[begin - first : end - first]

    def _read_block(self, file: str, number: int) -> memoryview:
        hashes = self.manifest.files[file].hashes
        start, stop = hashes.span(number)
        block = memoryview(bytearray(stop - start))
        read_block(self._folder, self._name, file, hashes, number, [block])
        return block


def read_safetensors(path: Path) -> StateDictReader:
    """Does not verify the bytes. Raises `DamagedError`, `OSError`."""
    return _safetensors(path.name, lambda: FileIO(open_named(path)))


def read_final_model(run: Path) -> StateDictReader:
    return _safetensors(MODEL, lambda: FileIO(open_below(run, MODEL)))


def _safetensors(name: str, opened: Callable[[], FileIO]) -> StateDictReader:
    try:
        with opened() as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(_MOST_HEADER_BYTES, size - 8):
                raise ValueError(f"a header of {length:,} bytes in {size:,}")
            header = parse_object(file.read(length).decode())
        header.pop("__metadata__", None)
        "".join(header).encode()  # half a surrogate pair is not allowed in a name
        specs: dict[str, TensorSpec] = {}
        spans: dict[str, tuple[int, int]] = {}
        for key, entry in header.items():
            shape = tuple(whole_number(size) for size in entry["shape"])
            if len(shape) > MOST_DIMS:
                raise ValueError(f"a tensor of {len(shape)} dims")
            specs[key] = TORCH_DTYPES[entry["dtype"]], shape
            first, last = map(whole_number, entry["data_offsets"])
            spans[key] = first, last
        _check_spans(specs, spans, size - 8 - length)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"{name} is not a safetensors file: {error}") from error

    def read(key: str) -> memoryview:
        start, stop = spans[key]
        with opened() as file:
            file.seek(8 + length + start)
            data = memoryview(bytearray(stop - start))
            at = 0
            while at < len(data) and (got := file.readinto(data[at:])):
                at += got
        if at < len(data):
            raise DamagedError(f"{name} ends too early")
        return data

    return StateDictReader(specs, read)


def _check_spans(
    specs: Mapping[str, TensorSpec],
    spans: Mapping[str, tuple[int, int]],
    size: int,
) -> None:
    """Raise `ValueError` unless the tensors' bytes are consecutive and fill the file."""
    at = 0
    for key, (start, stop) in sorted(spans.items(), key=lambda pair: pair[1]):
        dtype, shape = specs[key]
        if start != at or stop - start != math.prod(shape) * item_bytes(dtype):
            raise ValueError(f"{key!r} has the bytes from {start} to {stop}")
        at = stop
    if at != size:
        raise ValueError(f"its tensors have {at:,} bytes, and it has {size:,}")


CONFIGURATION = "huggingface"


def save_configuration(model: Any, folder: Path) -> None:
    for name in ("config", "generation_config"):
        save = getattr(getattr(model, name, None), "save_pretrained", None)
        if callable(save):
            save(str(folder))
