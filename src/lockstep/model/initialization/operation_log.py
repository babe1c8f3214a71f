"""Logs the ATen operations of a model's factory that write to a storage, and replays the operations
on which one tensor depends. An entry of the log refers to the storages that its operation reads and
writes. A view shares its storage, so an operation that makes a view is not logged. An operation on
a slice is a write to the storage. Assignments such as `p.data.copy_(q)` and `p.data = q` need no
special rule."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base.nested import tree_tensors
from lockstep.base.torch_private import storage_address, tree_map
from lockstep.keys import key as key_of


class OperationSeeds:
    """Seeds the default generators by a key and the number of each random operation."""

    def __init__(self, key: int) -> None:
        self._key = key
        self.count = 0

    def start(self) -> None:
        random.seed(self._key)
        np.random.seed(self._key & 0xFFFFFFFF)
        torch.default_generator.manual_seed(self._key)

    def next(self) -> int:
        self.count += 1
        return self.count - 1

    def seed(self, number: int) -> None:
        torch.default_generator.manual_seed(key_of(self._key, number))


@dataclass(frozen=True, slots=True)
class StorageView:
    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    @property
    def bytes(self) -> int:
        return int(np.prod(self.size, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    func: Any
    args: Any
    kwargs: Any
    outputs: tuple[StorageView | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    fresh: frozenset[int]
    """The storages that the operation makes or overwrites completely."""
    number: int | None
    generator: Tensor | None
    dtype: torch.dtype


class OperationLog:
    def __init__(self, seeds: OperationSeeds) -> None:
        self._seeds = seeds
        self._entries: list[LoggedOperation] = []
        self._writers: dict[int, list[int]] = {}
        self.storages: dict[int, Any] = {}
        """Maps addresses to storages. The log keeps storages alive, so their addresses stay unique.
        Fake storages have no memory."""
        self.constants: dict[int, torch.UntypedStorage] = {}
        """Maps addresses of storages to values, which are copies of tensors from lists, NumPy or
        files."""

    def keep(self, storage: Any) -> int:
        address = storage_address(storage)
        self.storages[address] = storage
        return address

    def add(self, entry: LoggedOperation) -> None:
        for storage in entry.writes:
            self._writers.setdefault(storage, []).append(len(self._entries))
        self._entries.append(entry)

    def is_whole(self, view: StorageView) -> bool:
        is_full = view.bytes == self.storages[view.storage].nbytes()
        return view.offset == 0 and is_full and _is_dense(view)

    def replay(self, views: Iterable[StorageView]) -> list[Tensor]:
        views = list(views)
        storages = {view.storage for view in views}
        operations = self._slice(storages)
        last = {
            storage: index
            for index in operations
            for storage in self._entries[index].reads | self._entries[index].writes
        }
        values: dict[int, torch.UntypedStorage] = {}
        state, dtype = torch.default_generator.get_state(), torch.get_default_dtype()
        try:
            with torch.no_grad():
                for index in operations:
                    entry = self._entries[index]
                    self._run(entry, values)
                    for storage in entry.reads | entry.writes:
                        if last[storage] == index and storage not in storages:
                            values.pop(storage, None)
                return [view.of(self._value(view.storage, values)) for view in views]
        finally:
            torch.default_generator.set_state(state)
            torch.set_default_dtype(dtype)

    def _slice(self, wanted: set[int]) -> list[int]:
        """Return the ascending indices of the logged operations on which the storages depend."""
        needed: set[int] = set()
        live: set[int] = set()  # each has exactly one pair in next_writes
        next_writes: list[tuple[int, int]] = []

        def follow(storage: int, before: int) -> None:
            place = bisect_left(self._writers.get(storage, ()), before) - 1
            if place >= 0:
                live.add(storage)
                heappush(next_writes, (-self._writers[storage][place], storage))

        for storage in wanted:
            follow(storage, len(self._entries))
        while next_writes:
            negative, storage = heappop(next_writes)
            index = -negative
            needed.add(index)
            live.remove(storage)
            entry = self._entries[index]
            if storage not in entry.fresh:
                follow(storage, index)
            for read in entry.reads - live:
                follow(read, index)
        return sorted(needed)

    def _value(self, storage: int, values: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        if storage in self.constants:
            return self.constants[storage]
        if storage not in values:
            values[storage] = torch.UntypedStorage(self.storages[storage].nbytes())  # type: ignore[no-untyped-call]
        return values[storage]

    def _run(self, entry: LoggedOperation, values: dict[int, torch.UntypedStorage]) -> None:
        def real(item: Any) -> Any:
            if not isinstance(item, StorageView):
                return item
            return item.of(self._value(item.storage, values))

        args, kwargs = tree_map(real, entry.args), tree_map(real, entry.kwargs)
        if entry.number is not None:
            self._seeds.seed(entry.number)
        if entry.generator is not None:
            generator = torch.Generator()
            generator.set_state(entry.generator)
            args, kwargs = tree_map(
                lambda item: generator if isinstance(item, torch.Generator) else item,
                (args, kwargs),
            )
        torch.set_default_dtype(entry.dtype)
        outputs = tree_tensors(entry.func(*args, **kwargs))
        for view, output in zip(entry.outputs, outputs, strict=True):
            if view is None:
                continue
            if (output.stride(), output.storage_offset()) == (view.stride, view.offset):
                values[view.storage] = output.untyped_storage()
            else:
                view.of(self._value(view.storage, values)).copy_(output)


def _is_dense(view: StorageView) -> bool:
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(view.stride, view.size, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
