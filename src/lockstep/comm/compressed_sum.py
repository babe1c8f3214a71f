"""All-reduces float32 vectors, and sends the numbers as bf16, fp16 or int8."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.hierarchical import HierarchicalAllReduce
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.comm.world import World

BLOCK = 256
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
_LARGEST = {"fp16": 32752.0, "int8": 127.0}
"""The number to which the largest number of a block is scaled. For fp16: half of the dtype's
maximum, because rounding may increase a number."""
_INT8_DIVISOR = 127.0001
"""Slightly more than 127: the largest float32, divided by this number and multiplied by 127, stays
finite."""
_LEAST_SCALE = 2.0**-126
_EXPONENT = 0x7F800000
_SCALE_BYTES = 4


class Rounding:
    """Encodes float32 numbers as `bf16`, `fp16` or `int8`. `fp16` and `int8` have one scale for
    each block of `BLOCK` numbers.

    The relative error of `bf16` is at most 2**-8. Numbers close to the largest float32 become
    infinite. The error of `fp16` is at most 2**-11 of the number, or 2**-38 of the largest number
    in the block. The error of `int8` is at most 1/254 of the largest number in the block, or
    2**-127. With `fp16` and `int8`, a non-finite number makes its whole block non-finite.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._dtype = _DTYPES[name]

    def bytes(self, numbers: int) -> int:
        scales = 0 if self.name == "bf16" else numbers // BLOCK * _SCALE_BYTES
        return numbers * self._dtype.itemsize + scales

    def encode(self, rows: Tensor) -> Tensor:
        """Encode float32 of shape (rows, numbers) as uint8 of shape (rows, bytes). `numbers` must
        be a multiple of `BLOCK`."""
        if self.name == "bf16":
            return rows.to(self._dtype).view(torch.uint8)
        blocks = rows.reshape(len(rows), rows.shape[1] // BLOCK, BLOCK)
        scales = self._scales(blocks.abs().amax(dim=2, keepdim=True))
        limit = _LARGEST[self.name]
        shrunk = (blocks / scales).clamp_(-limit, limit)
        codes = (shrunk.round_() if self._dtype is torch.int8 else shrunk).to(self._dtype)
        return torch.cat([part.flatten(1).view(torch.uint8) for part in (scales, codes)], dim=1)

    def decode(self, sent: Tensor) -> Tensor:
        if self.name == "bf16":
            return _numbers_in(sent, self._dtype).float()
        blocks = sent.shape[1] // self.bytes(BLOCK)
        scales, codes = torch.split(
            sent, [blocks * _SCALE_BYTES, blocks * BLOCK * self._dtype.itemsize], dim=1
        )
        numbers = _numbers_in(codes, self._dtype).float().view(len(sent), blocks, BLOCK)
        return numbers.mul_(_numbers_in(scales, torch.float32).unsqueeze(2)).flatten(1)

    def _scales(self, largest: Tensor) -> Tensor:
        if self.name == "int8":
            return (largest / _INT8_DIVISOR).clamp_(min=_LEAST_SCALE)
        powers = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)
        return powers.mul_(2.0**-14).clamp_(min=_LEAST_SCALE)


def _numbers_in(sent: Tensor, dtype: torch.dtype) -> Tensor:
    flat = torch.empty(sent.numel(), dtype=torch.uint8, device=sent.device)
    flat.view(sent.shape).copy_(sent)
    return flat.view(dtype).view(len(sent), sent.shape[1] // dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Senders:
    """The ranks that exchange compressed numbers. If several ranks share a host, one rank of the
    host sends the sum over the host."""

    group: Any
    """None for all processes."""
    rank: int
    size: int
    shared_memory: SharedMemoryGroup | None
    hierarchy: HierarchicalAllReduce | None
    """None if every rank is a sender."""

    @classmethod
    def of(cls, world: World) -> Senders:
        hierarchy = world.hierarchy
        if hierarchy is None:
            return cls(world.group, world.rank, world.size, world.shared_memory, None)
        group = hierarchy.leader_group
        rank = 0 if group is None else dist.get_rank(group)
        return cls(group, rank, len(hierarchy.leaders), None, hierarchy)

    @property
    def includes_this_rank(self) -> bool:
        return self.hierarchy is None or self.hierarchy.leader_group is not None

    def sum_on_host(self, tensor: Tensor) -> None:
        """All-reduce `tensor` over the ranks of this host. Does nothing if every rank is a
        sender."""
        if self.hierarchy is not None and self.hierarchy.shared_memory is not None:
            self.hierarchy.shared_memory.all_reduce(tensor)

    def broadcast_on_host(self, tensor: Tensor) -> None:
        """Broadcast `tensor` from this host's sender to the ranks of the host. Does nothing if
        every rank is a sender."""
        if self.hierarchy is not None and self.hierarchy.shared_memory is not None:
            self.hierarchy.shared_memory.broadcast(tensor, 0)

    def abort_on_error(self) -> AbstractContextManager[None]:
        return nullcontext() if self.hierarchy is None else self.hierarchy.abort_on_error()


class CompressedAllReduce:
    """The compressed all-reduce of one vector, with the same bits on every sender. All senders call
    `start`, `fold` and `finish` in the same order. Each sender sums one slice of the vectors in
    float32, in rank order. Each number is rounded twice, for any number of senders."""

    def __init__(self, rounding: Rounding, senders: Senders, *, keeps_residual: bool) -> None:
        """With `keeps_residual`, the rounding errors are kept for error feedback."""
        self._rounding = rounding
        self._senders = senders
        self._keeps_residual = keeps_residual
        self._work: dist.Work | None = None

    def start(self, numbers: Tensor, exact: Tensor) -> None:
        """Start the all-reduce of two flat float32 vectors. Only `numbers` is compressed."""
        size, shared = self._senders.size, self._senders.shared_memory
        rows = _in_rows(numbers, size, BLOCK)
        sent = self._rounding.encode(rows)
        if self._keeps_residual:
            self.residual = rows - self._rounding.decode(sent)
            """Rounding errors of this sender's numbers, and of its slice of the sum. The shape is
            (senders, numbers of each sender)."""
        outgoing = torch.cat([_in_rows(exact, size, 1).view(torch.uint8), sent], dim=1)
        self._exact_bytes = outgoing.shape[1] - sent.shape[1]
        self._received = torch.empty_like(outgoing)
        if shared is not None:
            sizes = [outgoing.shape[1]] * size
            shared.all_to_all(self._received.view(-1), outgoing.view(-1), sizes, sizes)
        else:
            self._work = dist.all_to_all_single(
                self._received, outgoing, group=self._senders.group, async_op=True
            )

    def fold(self) -> None:
        exact, numbers = (_sum_of_rows(part) for part in self._parts())
        sent = self._rounding.encode(numbers)
        if self._keeps_residual:
            self.residual[self._senders.rank] += (numbers - self._rounding.decode(sent))[0]
        mine = torch.cat([exact.view(torch.uint8), sent], dim=1)
        self._received = mine.new_empty(self._senders.size, mine.shape[1])
        if self._senders.shared_memory is not None:
            self._senders.shared_memory.all_gather(self._received.view(-1), mine.view(-1))
        else:
            self._work = dist.all_gather_single(
                self._received, mine, group=self._senders.group, async_op=True
            )

    def finish(self, numbers: Tensor, exact: Tensor) -> None:
        for target, rows in zip((exact, numbers), self._parts(), strict=True):
            target.copy_(rows.reshape(-1)[: target.numel()])

    def _parts(self) -> tuple[Tensor, Tensor]:
        if self._work is not None:
            self._work.wait()
        size = self._exact_bytes
        exact, numbers = self._received[:, :size], self._received[:, size:]
        return _numbers_in(exact, torch.float32), self._rounding.decode(numbers)


def _in_rows(numbers: Tensor, rows: int, multiple: int) -> Tensor:
    each = -(-numbers.numel() // (rows * multiple)) * multiple
    padded = numbers.new_zeros(rows * each)
    padded[: numbers.numel()] = numbers
    return padded.view(rows, each)


def _sum_of_rows(rows: Tensor) -> Tensor:
    total = rows[:1].clone()
    for row in rows[1:]:
        total += row
    return total
