"""A group of processes with its collectives, and `join`, which makes the process group of a run.
The group has all processes of a run, or the processes along a mesh axis."""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate, groupby
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from lockstep.base import accelerator
from lockstep.base.dtypes import dtype_name, torch_dtype
from lockstep.base.errors import LaunchError, install_excepthook, say
from lockstep.base.system import refuse_on_windows
from lockstep.base.torch_private import PrefixStore, Store, abort_accelerator_groups, default_store
from lockstep.comm.devices import (
    TIMEOUT,
    RankDevice,
    be_a_host_of_its_own,
    check_devices,
    check_own_group,
    chosen_backend,
    find_device,
    gather_devices,
    group_backends,
    unusable,
)
from lockstep.comm.hierarchical import HierarchicalAllReduce
from lockstep.comm.shared_memory import SharedMemoryGroup

BUCKET_NUMBERS = 2**22
"""Number of elements at which `World.sum_each` starts a new bucket."""
_HEAD_BYTES = 64
_IN_HEAD_BYTES = _HEAD_BYTES - 8
IN_PLACE_BYTES = 2**17
"""A tensor of at least this size is summed in place instead of in a bucket, in shared memory and on
accelerators."""


@dataclass(frozen=True, slots=True)
class World:
    """A group of processes with its collectives. With one process, every collective is the
    identity."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    owns_group: bool
    """True if lockstep made the process group."""
    group: Any = None
    """None for all processes."""
    shared_memory: SharedMemoryGroup | None = None
    """None if the processes do not share memory."""
    hierarchy: HierarchicalAllReduce | None = None
    """All-reduces CPU tensors over several hosts, some of which have several processes. None with
    numerics=bitwise."""
    ranks_per_device: int = 1
    """Number of ranks on the busiest device. More than 1 only with `--share-devices`."""

    @property
    def host_shared_memory(self) -> SharedMemoryGroup | None:
        return self.shared_memory if self.hierarchy is None else self.hierarchy.shared_memory

    def _memory_for(self, tensor: Tensor) -> SharedMemoryGroup | None:
        memory = self.shared_memory
        return memory if memory is not None and tensor.is_cpu and not memory.is_closed else None

    def leave(self) -> None:
        """Wait for all ranks at the end of a successful run."""
        if self.owns_group:
            dist.barrier()

    def end_process(self) -> NoReturn:
        """Wait for all ranks, and end the process. The rendezvous store may end with the first
        process."""
        if self.size > 1:
            dist.barrier()
        raise SystemExit(0)

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """All-gather rows in rank order. `counts` has the number of rows of each rank."""
        if self.size == 1:
            return rows
        padded = rows.contiguous()
        if min(counts) < max(counts):
            padded = rows.new_zeros((max(counts), *rows.shape[1:]))
            padded[: len(rows)] = rows
        everyone = padded.new_empty((self.size * len(padded), *padded.shape[1:]))
        if (memory := self._memory_for(padded)) is not None:
            memory.all_gather(_bytes(everyone), _bytes(padded))
        else:
            dist.all_gather_single(everyone, padded, group=self.group)
        if min(counts) == len(padded):
            return everyone
        parts = everyone.view(self.size, *padded.shape)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def all_reduce(self, tensor: Tensor) -> None:
        if self.size == 1:
            return
        if (memory := self._memory_for(tensor)) is not None:
            memory.all_reduce(tensor)
        elif self.hierarchy is not None and tensor.is_cpu:
            self.hierarchy.all_reduce(tensor)
        else:
            dist.all_reduce(tensor, group=self.group)

    def all_to_all(
        self,
        tensor: Tensor,
        received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
        *,
        label: int = 0,
    ) -> Tensor:
        """Send rows of a contiguous tensor to each rank. `sent` and `received` have the number of
        rows to and from each rank. None stands for equal numbers of rows. Shared memory raises
        `CallsDiffer` if the ranks' labels differ."""
        if self.size == 1:
            return tensor
        rows = len(tensor) if received is None else sum(received)
        output = tensor.new_empty(rows, *tensor.shape[1:])
        if (memory := self._memory_for(tensor)) is not None:
            memory.all_to_all(
                output, tensor, self._sizes(output, received), self._sizes(tensor, sent), label
            )
        else:
            dist.all_to_all_single(output, tensor, received, sent, group=self.group)
        return output

    def _sizes(self, tensor: Tensor, rows: Sequence[int] | None) -> list[int]:
        if rows is None:
            return [tensor.numel() // self.size] * self.size
        width = math.prod(tensor.shape[1:])
        return [width * each for each in rows]

    def sum_each(self, tensors: Sequence[Tensor]) -> None:
        """All-reduce tensors in place, on any device. Small tensors are summed together, in
        buckets."""
        together: list[Tensor] = []
        pending: list[dist.Work] = []
        for tensor in tensors:
            if not self._sums_in_place(tensor):
                together.append(tensor)
            elif tensor.is_cpu:
                self.all_reduce(tensor)
            else:  # a device need not end this sum before the next begins
                pending.append(dist.all_reduce(tensor, group=self.group, async_op=True))
        for bucket in _buckets(together):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(self.device)
            self.all_reduce(flat)
            sums = torch.split(flat.to(bucket[0].device), [tensor.numel() for tensor in bucket])
            shaped = [part.view(tensor.shape) for part, tensor in zip(sums, bucket, strict=True)]
            torch._foreach_copy_(bucket, shaped)
        for work in pending:
            work.wait()

    def _sums_in_place(self, tensor: Tensor) -> bool:
        if not tensor.is_contiguous() or tensor.nbytes < IN_PLACE_BYTES:
            return False
        if tensor.is_cpu:
            return self._memory_for(tensor) is not None
        return tensor.device == self.device

    def any(self, flag: bool) -> bool:
        """Return True on all ranks if `flag` is true on any rank. Every rank must call this
        method."""
        if self.size == 1:
            return flag
        count = torch.tensor([float(flag)])
        self.all_reduce(count)
        return bool(count.item())

    def gather_values(self, value: Any) -> list[Any]:
        """All-gather JSON values, for set-up and rare events. Equal values may be the same object.
        Short or equal values take one collective, and all others take two."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        rows = self.gather_rows(_tensor(_head(text)), [_HEAD_BYTES] * self.size)
        heads = [bytes(row.numpy()) for row in rows.view(self.size, _HEAD_BYTES)]
        if len(set(heads)) == 1:
            return [json.loads(text)] * self.size
        counts = [_length(head) for head in heads]
        if max(counts) > _IN_HEAD_BYTES:
            everything = bytes(self.gather_rows(_tensor(text), counts).numpy())
            ends = zip(counts, accumulate(counts), strict=True)
            texts = [everything[end - count : end] for count, end in ends]
        else:
            texts = [_text_in(head) for head in heads]
        values = {each: json.loads(each) for each in set(texts)}
        return [values[each] for each in texts]

    def value_of(self, rank: int, value: Any) -> Any:
        """Broadcast a JSON value from `rank`, for set-up and rare events. Every rank must call this
        method."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if rank == self.rank else b""
        head = _tensor(_head(text))
        self.broadcast(head, rank)
        received = bytes(head.numpy())
        if _length(received) <= _IN_HEAD_BYTES:
            return json.loads(_text_in(received))
        full_text = _tensor(text.ljust(_length(received)))
        self.broadcast(full_text, rank)
        return json.loads(bytes(full_text.numpy()))

    def value_from(self, rank: int, compute: Callable[[], Any]) -> Any:
        """Broadcast the JSON value that `rank` computes. Every rank must call this method."""
        return self.value_of(rank, compute() if rank == self.rank else None)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if self.size == 1:
            return
        if (memory := self._memory_for(tensor)) is not None:
            memory.broadcast(_bytes(tensor), source)
        else:
            dist.broadcast(tensor, group=self.group, group_src=source)

    def gather_ragged(self, rows: Tensor | None) -> Tensor:
        """All-gather rows on the CPU. Each rank may have a different number of rows, or None. At
        least one rank must have rows."""
        kinds = self.gather_values(None if rows is None else [dtype_name(rows.dtype), *rows.shape])
        if rows is None:
            dtype, _, *shape = next(kind for kind in kinds if kind is not None)
            rows = torch.empty((0, *shape), dtype=torch_dtype(dtype))
        return self.gather_rows(rows.cpu(), [0 if kind is None else kind[1] for kind in kinds])


_made: weakref.ref[Any] | None = None
_compared: tuple[weakref.ref[Any], int] | None = None
_excepthooks: tuple[Any, Any] = (None, None)


def join(
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    backend: str | None = None,
    timeout: timedelta = TIMEOUT,
    store: Store | None = None,
    share_devices: bool = False,
) -> World:
    """Meet the other processes of the run, and make the default process group or use the existing
    one. Every rank must call this function. `backend` replaces the default backend for tensors on
    this rank's device. Without a `store`, the processes meet at MASTER_ADDR:MASTER_PORT."""
    global _made, _compared, _excepthooks
    if local_size > 1 and accelerator.is_for_one_process():
        device, mine = torch.device("cpu"), RankDevice(host="", type="cpu")
        if local_rank == 0:
            say(
                f"lockstep: {local_size} processes compute on the CPU; the GPU of this machine is"
                " for one process"
            )
    else:
        device, mine = find_device(local_rank, shares=share_devices)
    chosen = ""
    try:
        chosen = chosen_backend(backend, device, rank, size, os.environ) if mine.type else ""
    except LaunchError as error:
        if size == 1 or backend is not None:  # --backend is the same on all ranks, so all raise
            raise
        # tell the other ranks, so that they do not wait for this one
        mine = replace(mine, refusal=str(error))
    has_group, before = dist.is_initialized(), sys.excepthook
    if has_group:
        rank, size = dist.get_rank(), dist.get_world_size()
        if not owns_group():
            check_own_group(backend, device)
    busiest = 1
    if size == 1:
        if not mine.type:
            raise LaunchError(unusable(mine, "this process"))
    else:
        refuse_on_windows(f"a run of {size} processes")
        if has_group and _compared is not None and _compared[0]() is dist.group.WORLD:
            busiest = _compared[1]
        elif has_group:
            busiest = check_devices(gather_devices(default_store(), rank, size, mine))
        else:
            with _network_errors_refused():
                meets = _store(rank, size, timeout) if store is None else store
            everyone = gather_devices(meets, rank, size, mine)
            busiest = check_devices(everyone)
            if busiest > 1:
                be_a_host_of_its_own(everyone, os.environ)
            with _network_errors_refused():
                dist.init_process_group(
                    group_backends(chosen, device),
                    timeout=timeout,
                    store=meets,
                    rank=rank,
                    world_size=size,
                    device_id=accelerator.process_group_device(device, chosen),
                )
            _made = weakref.ref(dist.group.WORLD)
            atexit.register(_at_exit)
        _compared = weakref.ref(dist.group.WORLD), busiest
    install_excepthook()
    if not has_group and owns_group():
        _excepthooks = before, sys.excepthook
    return World(
        rank,
        size,
        local_rank,
        local_size,
        device,
        owns_group=owns_group(),
        ranks_per_device=busiest,
    )


def leave() -> None:
    """Drop all references to the process group. The group's sockets and threads end with the last
    reference to the group."""
    global _made, _excepthooks
    if owns_group():
        dist.destroy_process_group()
    atexit.unregister(_at_exit)
    # remove torch's hook: it adds one at each `init_process_group`
    if sys.excepthook is _excepthooks[1]:
        sys.excepthook = _excepthooks[0]
    _made, _excepthooks = None, (None, None)


def _store(rank: int, size: int, timeout: timedelta) -> Store:
    made, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
    made.set_timeout(timeout)
    return PrefixStore("default_pg", made)


def owns_group() -> bool:
    return dist.is_initialized() and _made is not None and _made() is dist.group.WORLD


def _at_exit() -> None:
    """Abort the process group of a process that ends with an error. NCCL's shutdown would wait for
    the other ranks, which may wait for this rank in a collective."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    has_failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
    if owns_group() and not (has_failed and abort_accelerator_groups()):
        dist.destroy_process_group()


@contextmanager
def _network_errors_refused() -> Iterator[None]:
    try:
        yield
    except dist.DistNetworkError as error:
        host, port = (os.environ.get(f"MASTER_{part}", "(unset)") for part in ("ADDR", "PORT"))
        address = f"{host}:{port} (MASTER_ADDR:MASTER_PORT)"
        raise LaunchError(
            f"the rendezvous port {address} is in use by another program; give another, or let"
            " lockstep run choose"
            if "EADDRINUSE" in str(error)
            else f"cannot meet the other processes at {address}: {error}; every process must reach"
            " rank 0 there: check the address, and that rank 0 runs"
        ) from error


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
    return tensor.view(-1).view(torch.uint8)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    by_dtype = sorted(tensors, key=lambda tensor: str(tensor.dtype))
    for _, alike in groupby(by_dtype, key=lambda tensor: tensor.dtype):
        bucket: list[Tensor] = []
        for tensor in alike:
            bucket.append(tensor)
            if sum(map(Tensor.numel, bucket)) >= BUCKET_NUMBERS:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def exact_sum(values: Sequence[float]) -> float:
    """Return the exact sum of `values`, in any order. NaN and infinity propagate."""
    try:
        return math.fsum(values)
    # infinities of both signs, or a sum outside a float's range
    except (ValueError, OverflowError):
        return sum(values)
