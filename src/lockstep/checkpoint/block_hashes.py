"""Hashes of a file's blocks, so that a part of a file can be read and checked alone (law 6). Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from blake3 import blake3

BLOCK_BYTES = 4 << 20
HASH_BYTES = 16
"""Bytes kept of BLAKE3's 32. A wrong block passes by chance once in 2^128 times."""


@dataclass(frozen=True, slots=True)
class BlockHashes:
    """The size of a file and the hash of each of its blocks."""

    size_bytes: int
    blocks: tuple[str, ...]
    """The hash of each `BLOCK_BYTES` in order, in hexadecimal. The last block may be shorter."""

    def span(self, block: int) -> tuple[int, int]:
        """The bytes [start, stop) of a block."""
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.size_bytes)

    def covering(self, start: int, stop: int) -> range:
        """The indices of the blocks that hold the bytes [start, stop)."""
        return range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) if start < stop else range(0)


def hash_bytes(parts: Iterable[bytes | memoryview]) -> str:
    """The hash of bytes that are given in consecutive parts."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest(length=HASH_BYTES)


def split_blocks(data: memoryview) -> Iterator[memoryview]:
    """Yield the blocks of a file that is in memory."""
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


def hash_blocks(data: memoryview) -> BlockHashes:
    """Hash a file that is in memory."""
    return BlockHashes(len(data), tuple(hash_bytes([block]) for block in split_blocks(data)))
