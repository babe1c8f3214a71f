"""The manifest of a checkpoint: hashes of its files' blocks, positions of shards, and all other
state. Needs no torch.

Blocks let a part of a file be read and checked alone (law 6).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from lockstep.base.errors import LockstepError
from lockstep.base.foreign_files import NUMBER, check_kinds
from lockstep.checkpoint.tensor_shards import TensorShard, check_cover, whole_number

JsonObject = Mapping[str, Any]
FORMAT = 1
BLOCK_BYTES = 4 << 20
HASH_BYTES = 16
"""A prefix of BLAKE3's 32."""
MOST_BYTES = 1 << 30
"""Largest manifest that is read."""
_METADATA = {
    "recipe": dict, "plan": str, "world_size": int, "saved": str, "score": {"metric": str,
    "mode": str, "value": NUMBER},
    "optimizers": list, "code": dict, "versions": {"python": str},
}  # fmt: skip
_FILE_NAME = re.compile(r"(?:rank|part)-\d{1,9}\.safetensors")
_HASH = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")
_HEAD = re.compile(rb'\{"format":(\d{1,9}),"blake3":"([0-9a-f]{32})","content":')


class UnreadableError(LockstepError):
    """A checkpoint that cannot be read."""


class DamagedError(UnreadableError):
    """A checkpoint whose bytes are not those written. The text says which."""


class UnknownFormatError(UnreadableError):
    """A checkpoint of a format that this version does not know."""


class UnreachableError(UnreadableError):
    """A checkpoint that cannot be read now; the text says why."""


@dataclass(frozen=True, slots=True)
class BlockHashes:
    size_bytes: int
    blocks: tuple[str, ...]
    """Hash of each `BLOCK_BYTES` in hexadecimal; the last block may be shorter."""

    def span(self, block: int) -> tuple[int, int]:
        """Return the bytes [start, stop) of a block."""
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.size_bytes)

    def covering(self, start: int, stop: int) -> range:
        """Return the blocks that hold the bytes [start, stop)."""
        return range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) if start < stop else range(0)


def hash_bytes(parts: Iterable[bytes | memoryview]) -> str:
    """Hash consecutive parts of bytes."""
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
    """Shard -> its first byte in the file."""

    def to_json(self) -> dict[str, Any]:
        shards = [[*shard.to_json(), start] for shard, start in self.shards.items()]
        return {
            "bytes": self.hashes.size_bytes,
            "blocks": list(self.hashes.blocks),
            "shards": shards,
        }

    @classmethod
    def from_json(cls, entry: JsonObject) -> FileEntry:
        """Raises `ValueError` for shards that overlap or leave the file."""
        shards = {
            TensorShard.from_json(shard): whole_number(start) for *shard, start in entry["shards"]
        }
        size, blocks = whole_number(entry["bytes"]), tuple(entry["blocks"])
        if len(blocks) != -(-size // BLOCK_BYTES) or not all(map(_HASH.fullmatch, blocks)):
            raise ValueError(f"{len(blocks)} hashes are not those of {size} bytes")
        if len(shards) != len(entry["shards"]):
            raise ValueError("a file has a shard twice")
        at = 0
        for start, stop, name in sorted(
            (start, start + shard.bytes, shard.name) for shard, start in shards.items()
        ):
            if start < at or stop > size:
                raise ValueError(
                    f"a shard of {name!r} overlaps another, or reaches beyond its file"
                )
            at = stop
        return cls(BlockHashes(size, blocks), shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    step: int
    files: Mapping[str, FileEntry]
    values: JsonObject
    """The rest of the state."""
    metadata: JsonObject
    """Recipe, plan, processes, versions and time of the save."""

    def encode(self) -> bytes:
        files = {name: file.to_json() for name, file in self.files.items()}
        content = json.dumps(
            {"step": self.step, "metadata": self.metadata, "values": self.values, "files": files},
            separators=(",", ":"),
        )
        digest = _hash(FORMAT, content.encode())
        return f'{{"format":{FORMAT},"blake3":"{digest}","content":{content}}}\n'.encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Parse a manifest. Raises `DamagedError`, and `UnknownFormatError` for another version."""
        head = _HEAD.match(data)
        if head is None or not data.endswith(b"}\n"):
            raise DamagedError(
                "the manifest cannot be parsed: it does not begin and end as one does"
            )
        known = int(head[1])
        if _hash(known, memoryview(data)[head.end() : -2]) != head[2].decode():
            raise DamagedError("the manifest's hash is not that of its content")
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
                or score.get("metric") is None
                or score.get("value") is None
            ):
                raise ValueError(f"its score is {score}")
            return cls(
                step=whole_number(content["step"]), files=files, values=values, metadata=metadata
            )
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise DamagedError(f"the manifest cannot be parsed: {error}") from error


def begins_as_manifest(data: bytes) -> bool:
    """True if `data` begins as a manifest of any format."""
    return _HEAD.match(data) is not None


def merge_objects(parts: Sequence[JsonObject]) -> dict[str, Any]:
    """Merge JSON objects recursively. Of other values the first rank's counts."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
            found[key] = merge_objects([found[key], value]) if both else found.get(key, value)
    return found


def _hash(known: int, content: bytes | memoryview) -> str:
    return hash_bytes([f"{known}:".encode(), content])
