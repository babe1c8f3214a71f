"""Sketches of tensors: a few linear projections and the squared norm, in float64.

A sketch is linear: that of a sum is the sum of the sketches. So the factors with which a reduction
adds the ranks' gradients are read from sketches alone, which are small enough to be written at
every step. Those of shards add up to the whole tensor's, because the sign of an element depends on
its place in the whole tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROJECTIONS = 8
_CHUNK = 1 << 16
_CHUNKS = 1 << 16

_generator = torch.Generator().manual_seed(0x10C57E9)
_SIGNS = (
    torch.randint(0, 2, (PROJECTIONS, _CHUNK), generator=_generator, dtype=torch.float64) * 2 - 1
)
_CHUNK_SIGNS = torch.randint(0, 2, (_CHUNKS,), generator=_generator, dtype=torch.float64) * 2 - 1


@torch.no_grad()
def sketch(tensor: Tensor, first: int = 0) -> list[float]:
    """Return the projections of a tensor, and its squared norm last.

    `first`: the place of the tensor's first element in the whole one, in row-major order.
    """
    flat = _flat(tensor)
    squared = float(flat @ flat)
    count = flat.numel()
    place = first % _CHUNK
    if place + count <= _CHUNK:
        return [
            *(
                _SIGNS[:, place : place + count] @ flat * _CHUNK_SIGNS[first // _CHUNK % _CHUNKS]
            ).tolist(),
            squared,
        ]
    rows = -(-(place + count) // _CHUNK)
    padded = torch.zeros(rows * _CHUNK, dtype=torch.float64)
    padded[place : place + count] = flat
    signs = _CHUNK_SIGNS[(torch.arange(rows) + first // _CHUNK) % _CHUNKS]
    return [*(_SIGNS @ (signs @ padded.view(rows, _CHUNK))).tolist(), squared]


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).to("cpu", torch.float64)
