"""Sketches of tensors: a few random projections and the squared norm, in float64.

A sketch is small enough to be written at every step. The sketch of a sum is the sum of the
sketches, so sketches show the factors with which a reduction adds the ranks' gradients. The
sketches of shards add up to the sketch of the full tensor, because the sign of an element depends
on its position in the full tensor.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.evidence.tensors import PROJECTIONS, TOKEN_PROJECTIONS
from lockstep.keys import GOLDEN, MIX_FIRST, MIX_SECOND

_CHUNK = 1 << 16
_TOKENS = 256
_SIGN = np.uint64(1 << 63)


@torch.no_grad()
def sketch(tensor: Tensor, first: int = 0, name: str = "") -> list[float]:
    """Return the projections of a tensor, followed by its squared norm. `first` is the position of
    the tensor's first element in the full tensor. Sketches with different `name`s have independent
    signs."""
    flat = flattened(tensor)
    total = np.zeros(PROJECTIONS + 1)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") if name else 0
    for begin in range(0, len(flat), _CHUNK):
        values = flat[begin : begin + _CHUNK].to(torch.float64).numpy()
        with np.errstate(invalid="ignore"):  # the gradient may be infinite
            total[:-1] += project(values, seed, first + begin)
            total[-1] += np.dot(values, values)
    numbers: list[float] = total.tolist()
    return numbers


def project(values: np.ndarray[Any, Any], seed: int, first: int) -> np.ndarray[Any, Any]:
    """Multiply `values` by `PROJECTIONS` rows of random signs, and return the sum of each row. The
    pseudorandom generator splitmix64 makes the signs of element i from `seed` and `first` + i."""
    state = np.arange(first + 1, first + 1 + len(values), dtype=np.uint64)
    state *= np.uint64(GOLDEN)
    state += np.uint64(seed)
    state ^= state >> np.uint64(30)
    state *= np.uint64(MIX_FIRST)
    state ^= state >> np.uint64(27)
    state *= np.uint64(MIX_SECOND)
    state ^= state >> np.uint64(31)
    raw = values.view(np.uint64)
    # Row by row, because numpy then adds in a tree. A matrix product would have a hundred times the
    # rounding error, more than a float64 run has.
    rows = (raw ^ (state << np.uint64(row) & _SIGN) for row in range(PROJECTIONS))
    return np.array([row.view(np.float64).sum() for row in rows])


@torch.no_grad()
def token_sketches(tensor: Tensor) -> Tensor:
    """Return `TOKEN_PROJECTIONS` random projections of each token of a tensor (samples, tokens,
    ...), on the CPU."""
    rows = tensor.detach().reshape(*tensor.shape[:2], -1)
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    generator = torch.Generator().manual_seed(rows.shape[2])
    shape = rows.shape[2], TOKEN_PROJECTIONS
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.float32) * 2 - 1
    parts = torch.split(rows, _TOKENS, 1)
    return torch.cat([part.to(dtype).cpu() @ signs.to(dtype) for part in parts], 1)


def flattened(tensor: Tensor) -> Tensor:
    """Return the elements as a contiguous tensor on the CPU, in row-major order. Complex elements
    become pairs."""
    real = tensor.detach()
    if real.layout != torch.strided:
        real = real.to_dense()
    real = real.resolve_conj().resolve_neg()
    if real.is_complex():
        real = torch.view_as_real(real)
    # A tensor of one element may have any stride and still be contiguous; it could then not be
    # viewed as bytes.
    return real.contiguous().cpu().as_strided((real.numel(),), (1,))
