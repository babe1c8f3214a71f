"""The processes of a run, or of one of its axes: who takes part, where, and the few small exchanges that all else is made of."""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, compress, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.errors import LaunchError, install_excepthook
from lockstep.comm.hosts import Hosts
from lockstep.comm.shared_memory import SharedGroup

# Its name from torch 2.13 on; the old one warns there.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
BUCKET_NUMBERS = 2**22
"""Tensors are summed in pieces of about so many numbers."""
_HEAD_BYTES = 64
"""What is said first of a JSON text: its length, and all of it or its digest."""
_IN_HEAD_BYTES = _HEAD_BYTES - 8
IN_PLACE_BYTES = 2**17
"""A tensor of so many is summed where it is, where memory is shared: to copy it into a piece takes longer than an exchange of its own."""


@dataclass(frozen=True, slots=True)
class World:
    """Processes as one of them sees them. With one process there is no process group and every exchange is the identity."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    owns_group: bool
    """Whether the process group was made here, not by the caller. It is taken down when the process ends: a later run uses it too."""
    group: Any = None
    """Torch's process group, for some of the processes; `rank` and `size` are in it. None: all of them."""
    memory: SharedGroup | None = None
    """What exchanges CPU tensors between them faster than the group, where they share memory."""
    hosts: Hosts | None = None
    """What sums CPU tensors over them, where they are on several hosts of which some have several of them. Not under bitwise numerics."""

    @property
    def memory_here(self) -> SharedGroup | None:
        """What those of them share that are on this host, perhaps all."""
        return self.memory if self.hosts is None else self.hosts.memory

    def leave(self) -> None:
        """Wait for the others, where the processes may end after this. Every rank calls it, at the end of a run that went well."""
        if self.owns_group:
            dist.barrier()

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """All ranks' rows, in rank order: `counts[r]` rows of rank r, known to all. Every rank calls it. Shape (sum(counts), ...)."""
        if self.size == 1:
            return rows
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        everyone = padded.new_empty((self.size * len(padded), *padded.shape[1:]))
        if self.memory is not None and padded.is_cpu:
            self.memory.all_gather(_bytes(everyone), _bytes(padded))
        else:
            all_gather_single(everyone, padded, group=self.group)
        if min(counts) == len(padded):
            return everyone
        return torch.cat([part[:count] for part, count in zip(everyone.view(self.size, *padded.shape), counts, strict=True)])

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor`, contiguous and of one size on all ranks, by its sum over them. Every rank calls it."""
        if self.size == 1:
            return
        faster = self.memory or self.hosts
        if faster is not None and tensor.is_cpu:
            faster.all_reduce(tensor)
        else:
            dist.all_reduce(tensor, group=self.group)

    def sum_each(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks, which have them in one order. Every rank calls it.

        Those of one type go together, in buckets; tensors that are elsewhere than the ranks exchange are moved there and back.
        """
        alone = [self.memory is not None and t.is_cpu and t.is_contiguous() and t.nbytes >= IN_PLACE_BYTES for t in tensors]
        for tensor in compress(tensors, alone):
            self.all_reduce(tensor)
        for bucket in _buckets([tensor for tensor, summed in zip(tensors, alone, strict=True) if not summed]):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(self.device)
            self.all_reduce(flat)
            summed = torch.split(flat.to(bucket[0].device), [tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view(tensor.shape) for part, tensor in zip(summed, bucket, strict=True)])

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank. Every rank calls it."""
        if self.size == 1:
            return flag
        found = torch.tensor([float(flag)])
        self.all_reduce(found)
        return bool(found.item())

    def gather_values(self, value: Any) -> list[Any]:
        """Each rank's JSON value, in rank order. Every rank calls it. For set-up and rare events.

        Equal values may be one object. What is short, or the same on all ranks, takes one exchange, other values two.
        """
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        heads = bytes(self.gather_rows(_tensor(_head(text)), [_HEAD_BYTES] * self.size).numpy())
        said = [heads[start : start + _HEAD_BYTES] for start in range(0, len(heads), _HEAD_BYTES)]
        kinds = set(said)
        if len(kinds) == 1:
            return [json.loads(text)] * self.size
        lengths = {head: _length(head) for head in kinds}
        if max(lengths.values()) > _IN_HEAD_BYTES:
            counts = [lengths[head] for head in said]
            everything = bytes(self.gather_rows(_tensor(text), counts).numpy())
            said = [everything[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]
            values = {each: json.loads(each) for each in set(said)}
        else:
            values = {head: json.loads(_text_in(head)) for head in kinds}
        return [values[each] for each in said]

    def value_of(self, rank: int, value: Any) -> Any:
        """The JSON value of rank `rank`, whatever the others give. Every rank calls it. For set-up and rare events."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if rank == self.rank else b""
        head = _tensor(_head(text))
        self._broadcast(head, rank)
        told = bytes(head.numpy())
        if _length(told) <= _IN_HEAD_BYTES:
            return json.loads(_text_in(told))
        whole = _tensor(text.ljust(_length(told)))
        self._broadcast(whole, rank)
        return json.loads(bytes(whole.numpy()))

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        if self.memory is not None:
            self.memory.broadcast(tensor, source)
        else:
            dist.broadcast(tensor, group=self.group, group_src=source)

    def gather_ragged(self, rows: Tensor | None) -> Tensor:
        """All ranks' rows on the CPU, in rank order, whatever their number; None from a rank that has no row and knows no shape."""
        kind = None if rows is None else {"dtype": str(rows.dtype).removeprefix("torch."), "shape": list(rows.shape)}
        kinds = self.gather_values(kind)
        known = next(kind for kind in kinds if kind is not None)
        if rows is None:
            rows = torch.empty((0, *known["shape"][1:]), dtype=getattr(torch, known["dtype"]))
        return self.gather_rows(rows.cpu(), [0 if kind is None else kind["shape"][0] for kind in kinds])


_made: weakref.ref[Any] | None = None
"""The process group that `join` made, if it did."""


def join(*, rank: int, size: int, local_rank: int, local_size: int, timeout: timedelta = timedelta(minutes=10)) -> World:
    """Meet the other processes. Every rank calls it. A process group that is there already is used and left alone.

    The device is this rank's GPU where there are GPUs (NCCL, with Gloo for CPU tensors), else the CPU (Gloo). Raises `LaunchError` where
    there are fewer GPUs than processes, or the address of the rendezvous cannot be used.
    """
    world = _joined(rank, size, local_rank, local_size, timeout)
    install_excepthook()
    return world


def _joined(rank: int, size: int, local_rank: int, local_size: int, timeout: timedelta) -> World:
    global _made
    gpus = torch.cuda.device_count()
    use_gpu = gpus > 0
    if use_gpu and gpus < local_size:
        raise LaunchError(
            f"{local_size} processes on this machine and {gpus} GPUs; each process takes a GPU of its own; start {gpus} processes, or hide "
            "the GPUs (CUDA_VISIBLE_DEVICES=) to compute on the CPU"
        )
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device, owns_group=_is_ours())
    if size > 1:
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo", timeout=timeout, device_id=device if use_gpu else None)
        except dist.DistNetworkError as error:
            raise LaunchError(_network_error(error)) from error
        _made = weakref.ref(dist.group.WORLD)
        atexit.register(_take_down)
    return World(rank, size, local_rank, local_size, device, owns_group=size > 1)


def _is_ours() -> bool:
    return _made is not None and _made() is dist.group.WORLD


def _take_down() -> None:
    if dist.is_initialized() and _is_ours():
        dist.destroy_process_group()


def _network_error(error: Exception) -> str:
    address = f"{os.environ.get('MASTER_ADDR', '(unset)')}:{os.environ.get('MASTER_PORT', '(unset)')}"
    if "EADDRINUSE" in str(error):
        return (
            f"the rendezvous port {address} (MASTER_ADDR:MASTER_PORT) is in use by another program; "
            "give another, or let lockstep run choose"
        )
    return (
        f"cannot meet the other processes at {address} (MASTER_ADDR:MASTER_PORT): {error}; every process must be able to reach rank 0 "
        "there: check that it runs, and the address"
    )


def _head(text: bytes) -> bytes:
    shown = text if len(text) <= _IN_HEAD_BYTES else hashlib.sha256(text).digest()
    return len(text).to_bytes(8, "little") + shown.ljust(_IN_HEAD_BYTES, b"\0")


def _length(head: bytes) -> int:
    return int.from_bytes(head[:8], "little")


def _text_in(head: bytes) -> bytes:
    return head[8 : 8 + _length(head)]


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory, whatever the type of the numbers."""
    return tensor.view(-1).view(torch.uint8)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Those of one type of number together, as many as a bucket holds."""
    for _, alike in groupby(sorted(tensors, key=lambda tensor: str(tensor.dtype)), key=lambda tensor: tensor.dtype):
        bucket: list[Tensor] = []
        for tensor in alike:
            bucket.append(tensor)
            if sum(each.numel() for each in bucket) >= BUCKET_NUMBERS:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def exact_sum(values: Sequence[float]) -> float:
    """The correctly rounded sum, whatever the order: the same on any number of processes. NaN and infinity pass through."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum beyond what a float holds
        return sum(values)
