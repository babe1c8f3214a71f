"""Functions on single tensors for the collectives in shared memory: split, add, check and describe
them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128, torch.bool),
)


def add(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of two or more parts, added in their order, into `out`, which may be one of the
    first two parts."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def split(tensor: Tensor, length: int) -> tuple[Tensor, ...]:
    """Return pieces of `length` elements; the last one has the rest. An empty tensor is one empty
    piece."""
    pieces: tuple[Tensor, ...] = tensor.split(length)  # type: ignore[no-untyped-call]
    return pieces


def head(tensor: Tensor, length: int) -> Tensor:
    """Return the first `length` elements."""
    return tensor if len(tensor) == length else tensor[:length]


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def flat(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view. Raises `ValueError` unless the tensor is contiguous and on the
    CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        given = (
            f"a {'contiguous' if tensor.is_contiguous() else 'non-contiguous'} tensor on"
            f" {tensor.device}"
        )
        raise ValueError(
            f"{given}; shared memory exchanges contiguous tensors on the CPU; use"
            " tensor.contiguous()"
        )
    return tensor.detach().view(-1)


def refuse_overlap(output: Tensor, tensor: Tensor) -> None:
    """Raise `ValueError` if the two tensors share memory."""
    starts, ends = (
        [t.data_ptr() for t in (output, tensor)],
        [t.data_ptr() + t.nbytes for t in (output, tensor)],
    )
    if max(starts) < min(ends):
        raise ValueError(
            "the output overlaps the input, which is still read while the output is written; give "
            "a separate tensor"
        )


def described(tensor: Tensor) -> str:
    """Return the size and dtype in words: 12 float32."""
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def signature_of(collective: str, dtype_code: int, length: int, detail: int) -> int:
    """Return a call as one 64-bit word, for lengths below 2**39. `detail`: the source rank of a
    broadcast."""
    return ((length << 16 | detail) << 4 | dtype_code) << 4 | NAMES.index(collective)


def called(signature: int) -> tuple[str, str]:
    """Return the name of the collective, and its dtype and size in words."""
    name, code, detail, length = (
        NAMES[signature & 15],
        signature >> 4 & 15,
        signature >> 8 & 65535,
        signature >> 24,
    )
    text = str(DTYPES[code]).removeprefix("torch.") + (
        "" if name == "all_to_all" else f", {length} elements"
    )
    return name, text + (f", from rank {detail}" if name == "broadcast" else "")
