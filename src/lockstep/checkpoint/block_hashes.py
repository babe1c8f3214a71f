"""Files in blocks, each with a hash: who reads a part of a file checks that part, and nothing else (law 6). Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from blake3 import blake3

BLOCK_BYTES = 4 << 20
DIGEST_BYTES = 16
"""Of BLAKE3's 32: what is wrong by chance passes one time in 2^128."""


@dataclass(frozen=True, slots=True)
class Seal:
    """What a file's bytes are known by."""

    size_bytes: int
    blocks: tuple[str, ...]
    """Of each `BLOCK_BYTES` in order, the last one perhaps shorter: its hash, in hexadecimal."""

    def span(self, block: int) -> tuple[int, int]:
        """The bytes [start, stop) of a block."""
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.size_bytes)

    def covering(self, start: int, stop: int) -> range:
        """The blocks that the bytes [start, stop) lie in."""
        return range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) if start < stop else range(0)


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """Of bytes that come in parts, one behind another."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest(length=DIGEST_BYTES)


def cut(data: memoryview) -> Iterator[memoryview]:
    """The blocks of a file that is in memory."""
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


def seal(data: memoryview) -> Seal:
    return Seal(len(data), tuple(digest([block]) for block in cut(data)))
