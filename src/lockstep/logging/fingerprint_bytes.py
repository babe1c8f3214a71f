"""The bytes that a fingerprint is taken over, as `lockstep.logging.fingerprint` documents them, from wherever they come. Needs no torch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """A tensor of a state dict."""

    name: str
    dtype: str
    """As torch calls it: float32."""
    shape: tuple[int, ...]
    size_bytes: int
    data: Iterable[bytes | memoryview]
    """Row-major and little-endian, in as many parts as may be: `size_bytes` together."""


def digest(records: Iterable[Record]) -> str:
    """The fingerprint of tensors in the order of their names' UTF-8 bytes: 64 hexadecimal digits."""
    hasher = hashlib.sha256(usedforsecurity=False)
    for record in records:
        for text in (record.name.encode(), record.dtype.encode()):
            hasher.update(struct.pack("<Q", len(text)) + text)
        hasher.update(struct.pack(f"<{len(record.shape) + 2}Q", len(record.shape), *record.shape, record.size_bytes))
        for part in record.data:
            hasher.update(part)
    return hasher.hexdigest()
