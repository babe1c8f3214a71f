"""Computes the fingerprint of a model. Does not import torch at the top level, because commands
check a run's files without torch."""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.base.dtypes import tensor_spec
from lockstep.base.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor, nn

_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorRecord:
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    data: Iterable[bytes | memoryview]
    """Row-major, little-endian."""


def digest(records: Iterable[TensorRecord]) -> str:
    """`records` must be sorted by the names' UTF-8 bytes."""
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


def fingerprint(module_or_state_dict: nn.Module | Mapping[str, Any]) -> str:
    """Return the SHA-256 of all tensors of the state dict, as 64 hexadecimal digits.

    Any rank may call this function. If tensors are distributed (DTensor), every rank must call this
    function, because each tensor is gathered.

    The hash runs over one record for each tensor, without separators, in the order of the names'
    UTF-8 bytes:

    - length of the name in bytes: 8 bytes
    - name: UTF-8, as in the state dict
    - length of the dtype in bytes: 8 bytes
    - dtype: ASCII, torch's name without "torch.": `float32`, `bfloat16`, `complex64`, `bool`
    - number of dims: 8 bytes; 0 for a scalar
    - shape: 8 bytes for each dim
    - length of the data in bytes: 8 bytes
    - data: row-major, no padding, each element little-endian; a complex one is its real and then
      its imaginary part; a bool is one byte, 0 or 1

    Every number of 8 bytes is unsigned and little-endian. Tied weights appear once under each of
    their names. Device, strides and `requires_grad` do not change the hash; the sign of a zero and
    the payload of a NaN do. Entries that are not tensors (a module's extra state) are left out. At
    most 64 MiB of a tensor are copied at a time.

    Raises `RecipeError` for a tensor without dense bytes: on the meta device, sparse or quantized.
    """
    if not isinstance(module_or_state_dict, Mapping):
        module_or_state_dict = module_or_state_dict.state_dict()
    return digest(_records(module_or_state_dict))


def _records(state: Mapping[str, Any]) -> Iterator[TensorRecord]:
    import torch

    from lockstep.comm.mesh import full_tensor

    for name in sorted(state, key=str.encode):
        value = state[name]
        if not isinstance(value, torch.Tensor):
            continue
        tensor = full_tensor(value.detach())
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise RecipeError(
                f"state dict entry {name!r} is a tensor of layout {tensor.layout}, type"
                f" {tensor.dtype}, on device {tensor.device}; a fingerprint hashes dense bytes;"
                " materialise it, or make it dense"
            )
        size = tensor.numel() * tensor.element_size()
        data = map(_bytes, _pieces(tensor.resolve_conj().resolve_neg()))
        yield TensorRecord(name, *tensor_spec(tensor), size, data)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield contiguous 1-d tensors in row-major order."""
    count, limit = tensor.numel(), _PIECE_BYTES // tensor.element_size()
    if count <= limit:
        yield tensor.reshape(-1).contiguous()
    elif tensor.is_contiguous():
        flat = tensor.view(-1)
        yield from (flat[start : start + limit] for start in range(0, count, limit))
    else:
        rows = limit // (count // len(tensor))
        for part in tensor.split(rows) if rows else tensor:  # type: ignore[no-untyped-call]
            yield from _pieces(part)


def _bytes(piece: Tensor) -> memoryview:
    import torch

    width = piece.element_size() // (2 if piece.is_complex() else 1)
    # A contiguous tensor of one element may have any stride, but `view` accepts stride 1 only.
    array = piece.cpu().as_strided(piece.shape, (1,)).view(torch.uint8).numpy()
    return (array if sys.byteorder == "little" else array.reshape(-1, width)[:, ::-1].copy()).data
