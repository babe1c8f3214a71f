"""Checksums of tensors, computed on the tensors' devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD_BYTES = 8
_MIX = 0x9E3779B97F4A7C15 - 2**64
"""Odd factor that makes a combined checksum depend on the order of the tensors."""


def checksum(tensor: Tensor) -> Tensor:
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // _WORD_BYTES * _WORD_BYTES
    words = raw[:whole]
    if not whole or raw.storage_offset() % _WORD_BYTES:
        words = words.clone()
    return words.view(torch.int64).sum() + raw[whole:].sum(dtype=torch.int64)


def mixed(sums: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64)
    for each in sums:
        total = total * _MIX + each
    return total


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    return on_cpu([checksum(tensor) for tensor in tensors])


def on_cpu(sums: Sequence[Tensor]) -> Tensor:
    """Copy the checksums to the CPU, with one copy per device."""
    gathered = torch.empty(len(sums), dtype=torch.int64)
    for device in {each.device for each in sums}:
        indices = [index for index, each in enumerate(sums) if each.device == device]
        gathered[indices] = torch.stack([sums[index] for index in indices]).cpu()
    return gathered
