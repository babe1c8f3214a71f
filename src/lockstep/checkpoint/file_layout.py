"""The layout of a safetensors file, computed before its data exist: a header, then one shard after another.

Format (https://huggingface.co/docs/safetensors): 8 bytes, little-endian, give the length of the JSON header, which names each
tensor with its dtype, shape and offsets, without gaps. Shards whose size is a multiple of 64 bytes come first, then the others by
the size of their elements, largest first. Each shard is thus aligned for its dtype and can be used in place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from lockstep.checkpoint.tensor_shards import TensorShard, item_bytes

ALIGNMENT = 64
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16", "int16": "I16",
    "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "int32": "I32", "float32": "F32", "complex64": "C64", "uint64": "U64",
    "int64": "I64", "float64": "F64",
}  # fmt: skip
"""Torch's name of a dtype -> its name in safetensors."""


class FileLayout:
    """The header of one file, and the position of each shard in it."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        ordered = sorted(shards, key=lambda shard: (shard.bytes % ALIGNMENT != 0, -item_bytes(shard.dtype), shard.key))
        entries: dict[str, object] = {}
        starts: dict[TensorShard, int] = {}
        at = 0
        for shard in ordered:
            starts[shard] = at
            entries[shard.key] = {"dtype": DTYPES[shard.dtype], "shape": shard.lengths, "data_offsets": [at, at + shard.bytes]}
            at += shard.bytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-(8 + len(header)) % ALIGNMENT)
        self.header = len(header).to_bytes(8, "little") + header
        self.bytes = len(self.header) + at
        self._starts = {shard: len(self.header) + start for shard, start in starts.items()}

    def span(self, shard: TensorShard) -> tuple[int, int]:
        """The bytes [start, stop) of a shard in the file."""
        return self._starts[shard], self._starts[shard] + shard.bytes
