"""The byte format that a fingerprint hashes; see `lockstep.logging.fingerprint`. Imports no
torch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor of a state dict, as bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    data: Iterable[bytes | memoryview]
    """Row-major, little-endian elements in any number of parts."""


def digest(records: Iterable[TensorRecord]) -> str:
    """Return the fingerprint. `records`: sorted by the names' UTF-8 bytes."""
    hasher = hashlib.sha256(usedforsecurity=False)
    for record in records:
        for text in (record.name.encode(), record.dtype.encode()):
            hasher.update(struct.pack("<Q", len(text)) + text)
        hasher.update(
            struct.pack(
                f"<{len(record.shape) + 2}Q", len(record.shape), *record.shape, record.size_bytes
            )
        )
        for part in record.data:
            hasher.update(part)
    return hasher.hexdigest()
