"""The manifest of a checkpoint, and verified reads. A manifest has the hashes of blocks of the
files, the positions of shards, and all state that is not tensors. Needs no torch."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from lockstep.base.errors import LockstepError
from lockstep.base.files import NUMBER, check_kinds
from lockstep.checkpoint.storage import MANIFEST, CheckpointName, Storage
from lockstep.checkpoint.tensor_shards import TensorShard, check_cover, whole_number

JsonObject = Mapping[str, Any]
FORMAT = 1
BLOCK_BYTES = 4 << 20
HASH_BYTES = 16
"""Number of bytes that are kept of BLAKE3's 32 bytes."""
MOST_BYTES = 1 << 30
_HEAD_BYTES = 1 << 20
"""Number of bytes that are read first, to check that a large file begins like a manifest."""
DAMAGE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.EIO,
    errno.EINVAL,
    errno.EFBIG,
)
"""Errors for a file that is missing, damaged, or does not belong to a run."""
_METADATA = {
    "recipe": dict, "plan": str, "world_size": int, "saved": str, "score": {"metric": str,
    "mode": str, "value": NUMBER},
    "optimizers": list, "code": dict, "versions": {"python": str},
}  # fmt: skip
_NOT_AS_WRITTEN = (
    *(ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError),
)
_FILE_NAME = re.compile(r"(?:rank|part)-\d{1,9}\.safetensors")
_HASH = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")
_HEAD = re.compile(rb'\{"format":(\d{1,9}),"blake3":"([0-9a-f]{32})","content":')


class UnreadableError(LockstepError): ...


class DamagedError(UnreadableError):
    """The bytes differ from the bytes that were written."""


class UnknownFormatError(UnreadableError): ...


class UnreachableError(UnreadableError): ...


@dataclass(frozen=True, slots=True)
class BlockHashes:
    size_bytes: int
    blocks: tuple[str, ...]
    """Hexadecimal hash of each block of `BLOCK_BYTES`."""

    def span(self, block: int) -> tuple[int, int]:
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.size_bytes)

    def covering(self, start: int, stop: int) -> range:
        return range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) if start < stop else range(0)


def hash_bytes(parts: Iterable[bytes | memoryview]) -> str:
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest(length=HASH_BYTES)


def split_blocks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


def hash_blocks(data: memoryview) -> BlockHashes:
    return BlockHashes(len(data), tuple(hash_bytes([block]) for block in split_blocks(data)))


@dataclass(frozen=True, slots=True)
class FileEntry:
    hashes: BlockHashes
    shards: Mapping[TensorShard, int]
    """First byte of each shard in the file."""

    def to_json(self) -> dict[str, Any]:
        shards = [[*shard.to_json(), start] for shard, start in self.shards.items()]
        return {
            "bytes": self.hashes.size_bytes,
            "blocks": list(self.hashes.blocks),
            "shards": shards,
        }

    @classmethod
    def from_json(cls, entry: JsonObject) -> FileEntry:
        """Raises `ValueError` for shards that overlap or lie outside of the file."""
        shards = {
            TensorShard.from_json(shard): whole_number(start) for *shard, start in entry["shards"]
        }
        size, blocks = whole_number(entry["bytes"]), tuple(entry["blocks"])
        if len(blocks) != -(-size // BLOCK_BYTES) or not all(map(_HASH.fullmatch, blocks)):
            raise ValueError(f"{len(blocks)} hashes do not fit {size} bytes")
        if len(shards) != len(entry["shards"]):
            raise ValueError("a file has a shard twice")
        at = 0
        for shard, start in sorted(shards.items(), key=lambda pair: (pair[1], pair[0].bytes)):
            if start < at or start + shard.bytes > size:
                raise ValueError(
                    f"a shard of {shard.name!r} overlaps another, or reaches beyond its file"
                )
            at = start + shard.bytes
        return cls(BlockHashes(size, blocks), shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    step: int
    files: Mapping[str, FileEntry]
    values: JsonObject
    """State that is not tensors, as JSON."""
    metadata: JsonObject
    """Recipe, plan, processes, versions and time of the save."""

    def encode(self) -> bytes:
        files = {name: file.to_json() for name, file in self.files.items()}
        head = {"step": self.step, "metadata": self.metadata, "values": self.values}
        content = json.dumps({**head, "files": files}, separators=(",", ":"))
        digest = _hash(FORMAT, content.encode())
        return f'{{"format":{FORMAT},"blake3":"{digest}","content":{content}}}\n'.encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Raises `DamagedError`, or `UnknownFormatError` for another version of the format."""
        head = _HEAD.match(data)
        if head is None or not data.endswith(b"}\n"):
            raise DamagedError(
                "the manifest cannot be parsed: it does not begin and end as one does"
            )
        known = int(head[1])
        if _hash(known, memoryview(data)[head.end() : -2]) != head[2].decode():
            raise DamagedError("the manifest's hash does not match its content")
        if known != FORMAT:
            raise UnknownFormatError(
                f"the checkpoint has format {known}, and this version of lockstep reads {FORMAT};"
                " load it with a newer one"
            )
        try:
            content = json.loads(data[head.end() : -2])
            files = {name: FileEntry.from_json(entry) for name, entry in content["files"].items()}
            if wrong := [name for name in files if not _FILE_NAME.fullmatch(name)]:
                raise ValueError(f"it names a file {wrong[0]!r}")
            check_cover(shard for entry in files.values() for shard in entry.shards)
            values, metadata = content["values"], content["metadata"]
            if not isinstance(values, dict) or not isinstance(metadata, dict):
                raise ValueError("values and metadata are objects")
            check_kinds(metadata, _METADATA, "metadata.")
            score = metadata.get("score")
            if score is not None and (
                score.get("mode") not in ("min", "max")
                or None in (score.get("metric"), score.get("value"))
            ):
                raise ValueError(f"its score is {score}")
            step = whole_number(content["step"])
            return cls(step=step, files=files, values=values, metadata=metadata)
        except _NOT_AS_WRITTEN as error:
            raise DamagedError(f"the manifest cannot be parsed: {error}") from error


def merge_objects(parts: Sequence[JsonObject]) -> dict[str, Any]:
    """Merge the JSON objects of ranks recursively. For a value that is no object, use the first
    rank's value."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = merge_objects([merged[key], value]) if both else merged.get(key, value)
    return merged


def _hash(known: int, content: bytes | memoryview) -> str:
    return hash_bytes([f"{known}:".encode(), content])


def read_manifest(folder: Storage, name: CheckpointName) -> Manifest:
    with _storage_errors(MANIFEST):
        data = folder.read(name, MANIFEST, 0, _HEAD_BYTES)
        if len(data) == _HEAD_BYTES and _HEAD.match(data):
            data += folder.read(name, MANIFEST, _HEAD_BYTES, MOST_BYTES)
    manifest = Manifest.decode(data)
    if manifest.step != name.step:
        raise DamagedError(f"the manifest belongs to step {manifest.step}")
    return manifest


def read_block(
    folder: Storage,
    name: CheckpointName,
    file: str,
    hashes: BlockHashes,
    block: int,
    parts: Sequence[memoryview],
) -> None:
    """Read a block into `parts`, and check its hash. The sizes of `parts` add up to the block's
    size."""
    start, stop = hashes.span(block)
    length = 0

    def read() -> Iterator[memoryview]:
        nonlocal length
        for part in folder.read_into(name, file, start, parts):
            length += len(part)
            yield part

    with _storage_errors(file):
        digest = hash_bytes(read())  # hash bytes while they are in the processor's cache
    if length < stop - start:
        raise DamagedError(_too_short(file, start + length, hashes))
    if digest != hashes.blocks[block]:
        raise DamagedError(f"{file} has other bytes than were written between {start} and {stop}")


def check(folder: Storage, name: CheckpointName) -> list[str]:
    """Verify every byte. Return the descriptions of all damage."""
    try:
        manifest = read_manifest(folder, name)
    except DamagedError as error:
        return [str(error)]
    hashes_of = {file: entry.hashes for file, entry in manifest.files.items()}
    largest = max((min(hashes.size_bytes, BLOCK_BYTES) for hashes in hashes_of.values()), default=0)
    spare = [bytearray(largest) for _ in range(folder.readers)]

    def wrong_length(file: str) -> str | None:
        hashes = hashes_of[file]
        try:
            with _storage_errors(file):
                size = folder.size(name, file)
        except DamagedError as error:
            return str(error)
        if size > hashes.size_bytes:
            return f"{file} goes on behind its end: it has {size} bytes for {hashes.size_bytes}"
        return _too_short(file, size, hashes) if size < hashes.size_bytes else None

    def wrong_block(at: tuple[str, int]) -> str | None:
        file, block = at
        start, stop = hashes_of[file].span(block)
        buffer = spare.pop()
        try:
            parts = [memoryview(buffer)[: stop - start]]
            read_block(folder, name, file, hashes_of[file], block, parts)
        except DamagedError as error:
            return str(error)
        finally:
            spare.append(buffer)
        return None

    with ThreadPoolExecutor(folder.readers) as threads:
        lengths = list(threads.map(wrong_length, hashes_of))
        whole = [file for file, wrong in zip(hashes_of, lengths, strict=True) if wrong is None]
        blocks = [(file, block) for file in whole for block in range(len(hashes_of[file].blocks))]
        damages = [*lengths, *threads.map(wrong_block, blocks)]
    return [text for text in damages if text is not None]


def _too_short(file: str, size: int, hashes: BlockHashes) -> str:
    return f"{file} ends too early: it has {size} of {hashes.size_bytes} bytes"


@contextmanager
def _storage_errors(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise DamagedError(f"{file} is missing") from error
        text = f"{file} cannot be read: {error.strerror or error}"
        raise (DamagedError if error.errno in DAMAGE else UnreachableError)(text) from error
