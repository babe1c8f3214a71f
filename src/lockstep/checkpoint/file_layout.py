"""The bytes of a safetensors file, laid out before any of them is there: a header, then one piece behind another.

https://huggingface.co/docs/safetensors: 8 bytes, little-endian, say how long the JSON header is; it names each tensor with its dtype, shape
and place, without gaps. Pieces that fill 64-byte lines come first, then the others by the size of their elements, largest first: so each
starts at a multiple of it, and can be used where it lies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from lockstep.checkpoint.pieces import Piece, item_bytes

ALIGNMENT = 64
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16", "int16": "I16",
    "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "int32": "I32", "float32": "F32", "complex64": "C64", "uint64": "U64",
    "int64": "I64", "float64": "F64",
}  # fmt: skip
"""Of torch, and as safetensors writes them."""


class Image:
    """Where everything lies in one file."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        ordered = sorted(pieces, key=lambda piece: (piece.bytes % ALIGNMENT != 0, -item_bytes(piece.dtype), piece.key))
        entries: dict[str, object] = {}
        places: dict[Piece, int] = {}
        at = 0
        for piece in ordered:
            places[piece] = at
            entries[piece.key] = {"dtype": DTYPES[piece.dtype], "shape": piece.lengths, "data_offsets": [at, at + piece.bytes]}
            at += piece.bytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-(8 + len(header)) % ALIGNMENT)
        self.header = len(header).to_bytes(8, "little") + header
        self.bytes = len(self.header) + at
        self._places = {piece: len(self.header) + place for piece, place in places.items()}

    def span(self, piece: Piece) -> tuple[int, int]:
        """The bytes [start, stop) of the file that are a piece's."""
        return self._places[piece], self._places[piece] + piece.bytes
