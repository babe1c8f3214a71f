"""Records the samples of each batch of a DataLoader. A pass is one iteration over the
DataLoader."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import sys
import weakref
from collections import Counter, UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from lockstep.audit.probes.draws import Draws, generator_state, short_digest
from lockstep.audit.probes.recorder import RecordWriter, frames
from lockstep.base import torch_private

MOST_SAMPLES = 512
MOST_BYTES = 1 << 16
LEAST_ITEMS = 8
"""Lists and arrays with fewer items are not compared, because they may be settings of the rank."""
FETCHES = 3


class Loaders:
    def __init__(self, recorder: RecordWriter, draws: Draws) -> None:
        self._recorder, self._draws = recorder, draws
        self._numbers = weakref.WeakKeyDictionary[Any, int]()
        self._count = itertools.count()
        self._lines = weakref.WeakKeyDictionary[Any, str]()
        self._described = weakref.WeakKeyDictionary[Any, dict[str, Any]]()
        self._passes: dict[int, int] = {}
        self._of: dict[int, tuple[int, int]] = {}  # id of an iterator -> its loader and pass
        self._indices: dict[int, deque[Any]] = {}
        self._fetches = 0
        self.last: tuple[int, int] | None = None
        """Loader and pass of the latest batch; None after the end of the pass."""
        self.last_trained: tuple[int, int] | None = None
        """Loader and pass of the latest batch that was fetched with gradients enabled."""
        # number of batches since the last backward, for passes that have not ended
        self._since: Counter[tuple[int, int]] = Counter()
        self.state = ""

    def install(self) -> None:
        recorder, (iterator, fetchers) = self._recorder, torch_private.loader_classes()
        recorder.wrap(DataLoader, "__init__", after=self._after_init)
        recorder.wrap(
            DataLoader,
            "__iter__",
            before=lambda _: setattr(self, "_fetches", 0),
            after=self._after_iter,
            around=self._draws.others,
        )
        # both methods draw the indices of the first batches ahead, for the loader's workers
        for name in ("__init__", "_reset"):
            recorder.wrap(iterator, name, before=self._before_indices)
        recorder.wrap(iterator, "_next_index", after=self._after_index)
        recorder.watch(iterator, "__next__", self._next)
        for fetcher in fetchers:
            recorder.watch(fetcher, "fetch", self._fetch)

    def take(self) -> list[tuple[int, int]]:
        """Return the (loader, pass) pairs whose batches a backward used.

        A backward used the last batch, and the batch of each pass that gave exactly one batch since
        the last backward. An evaluation between two backward passes gives several batches.
        """
        last = self.last_trained
        taken = [place for place, count in self._since.items() if count == 1 or place == last]
        self._since.clear()
        return taken or ([last] if last is not None else [])

    def _after_init(self, _: Any, loader: Any, *__: Any, **___: Any) -> None:
        self._lines.setdefault(loader, self._origin())

    def _origin(self) -> str:
        """Return the line of the script that made the loader. Accelerate and Lightning may have
        wrapped the loader."""
        for frame in frames():
            if self._recorder.is_users_file(frame.f_code.co_filename):
                break
            for value in frame.f_locals.values():
                if isinstance(value, DataLoader) and value in self._lines:
                    return self._lines[value]
        return self._recorder.line()

    def _after_iter(self, iterator: Any, loader: Any) -> None:
        number = self._numbers.get(loader)
        if number is None:
            number = self._numbers[loader] = next(self._count)
        current = self._passes[number] = self._passes.get(number, -1) + 1
        self._of[id(iterator)] = (number, current)
        self._recorder.write(
            "pass",
            loader=number,
            number=current,
            line=self._lines.get(loader, ""),
            loop=self._recorder.line(),
            workers=loader.num_workers,
            batches=length_of(loader),
            batch_size=loader.batch_size,
            drop_last=bool(loader.drop_last),
            dataset=self._describe(loader.dataset) if current == 0 else None,
            sampler=sampler_settings(loader),
        )

    def _describe(self, dataset: Any) -> dict[str, Any]:
        """Describe a dataset at its first read. After the first read, the dataset may contain
        cached samples."""
        if type(dataset).__weakrefoffset__ == 0 or type(dataset).__hash__ is None:
            return describe(dataset)
        if dataset not in self._described:
            self._described[dataset] = describe(dataset)
        return self._described[dataset]

    def _next(self, original: Callable[..., Any], iterator: Any) -> Any:
        try:
            with self._draws.others():
                batch = original(iterator)
        except StopIteration:
            if (place := self._of.get(id(iterator))) is not None:
                self._recorder.write("pass_end", loader=place[0], number=place[1])
                self._since.pop(place, None)
                self.last = None if self.last == place else self.last
            raise
        self._recorder.safely(self._after_batch, batch, iterator)
        return batch

    def _before_indices(self, iterator: Any, *_: Any, **__: Any) -> None:
        self._indices[id(iterator)] = deque()

    def _after_index(self, index: Any, iterator: Any) -> None:
        self._indices.setdefault(id(iterator), deque()).append(index)

    def _after_batch(self, batch: Any, iterator: Any) -> None:
        place = self._of.get(id(iterator))
        if place is None:
            return
        waiting = self._indices.get(id(iterator))
        index = waiting.popleft() if waiting else None
        indices: list[Any] = list(index) if isinstance(index, list | tuple) else [index]
        are_numbers = all(
            isinstance(each, int | np.integer) or (isinstance(each, Tensor) and each.numel() == 1)
            for each in indices
        )
        self.last, self.state = place, generator_state()
        grad = torch.is_grad_enabled()
        if grad:
            self.last_trained = place
            self._since[place] += 1
        self._recorder.write(
            "batch",
            loader=place[0],
            number=place[1],
            indices=[int(each) for each in indices] if are_numbers else None,
            samples=digests(batch),
            grad=grad,
        )

    def _fetch(self, original: Callable[..., Any], fetcher: Any, index: Any) -> Any:
        before = self._recorder.safely(random_states) if self._fetches < FETCHES else None
        result = original(fetcher, index)
        if before is not None:
            self._recorder.safely(self._after_fetch, before)
        return result

    def _after_fetch(self, before: dict[str, str]) -> None:
        after = random_states()
        drawn = {name: state for name, state in before.items() if after.get(name) != state}
        self._fetches += 1
        if drawn:
            worker = getattr(get_worker_info(), "id", None)
            self._recorder.write("fetch", worker=worker, number=self._fetches, drawn=drawn)


def length_of(loader: Any) -> int | None:
    try:
        return None if isinstance(loader.dataset, IterableDataset) else len(loader)
    except TypeError:
        return None


def random_states() -> dict[str, str]:
    states = {"torch": generator_state(), "python": f"{hash(random.getstate()[1]):x}"}
    if "numpy.random" in sys.modules:
        kind, keys, place, *_ = np.random.get_state(legacy=True)
        states["numpy"] = short_digest(np.asarray(keys).tobytes() + f"{kind}{place}".encode())
    return states


def digests(batch: Any) -> list[str]:
    """Return a digest of each sample of a batch, or one digest of the whole batch."""
    leaves = [
        each.detach().to("cpu") if isinstance(each, Tensor) else _from_numpy(each)
        for each in _leaves(batch)
    ]
    sizes = {len(each) if each.dim() else -1 for each in leaves}
    if len(sizes) == 1 and -1 not in sizes:
        return [
            _digest([each[row] for each in leaves]) for row in range(min(MOST_SAMPLES, sizes.pop()))
        ]
    return [_digest(leaves)] if leaves else []


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, UserDict):  # a BatchEncoding of transformers
        batch = batch.data
    elif dataclasses.is_dataclass(batch):
        batch = vars(batch)
    for leaf in torch_private.tree_leaves(batch):
        if isinstance(leaf, Tensor) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"):
            yield leaf


def _from_numpy(array: Any) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _digest(tensors: list[Tensor]) -> str:
    data = b""
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            data += flat[:: -(-len(flat) // MOST_BYTES)].numpy().tobytes()
    return short_digest(data)


def sampler_settings(loader: Any) -> dict[str, Any]:
    sampler = loader.sampler
    settings: dict[str, Any] = {
        "type": type(sampler).__name__,
        "batch_type": type(loader.batch_sampler).__name__,
    }
    for name in (
        "epoch",
        "shuffle",
        "num_replicas",
        "rank",
        "drop_last",
        "replacement",
        "num_samples",
        "total_size",
        "seed",
    ):
        if isinstance(value := getattr(sampler, name, None), int):
            settings[name] = value
    return settings


def describe(dataset: Any) -> dict[str, Any]:
    if isinstance(dataset, Subset):
        inner = describe(dataset.dataset)
        indices = torch.as_tensor(list(dataset.indices), dtype=torch.int64)
        of_indices = _digest([indices])
        places, base = indices.tolist(), inner.pop("subset", None)
        return {
            "whole": inner["digest"],
            "whole_length": inner["length"],
            **inner,
            "length": len(dataset),
            "digest": inner["digest"] and f"{inner['digest']}/{of_indices}",
            "data": {**inner["data"], "indices": of_indices},
            "subset": places if base is None else [base[each] for each in places],
        }
    is_iterable = isinstance(dataset, IterableDataset)
    try:
        held = _held_by(dataset) if hasattr(dataset, "__dict__") else _text_of(dataset)
        digest_of_all = short_digest(held.encode())
    except _Unreadable:
        digest_of_all = ""
    return {
        "type": type(dataset).__name__,
        "iterable": is_iterable,
        "length": len(dataset) if not is_iterable and hasattr(dataset, "__len__") else None,
        "held": held_items(dataset) if is_iterable else None,
        "digest": digest_of_all,
        "data": data_of(dataset),
    }


def data_of(dataset: Any, depth: int = 0) -> dict[str, str]:
    """Return digests of the tensors, arrays and lists that are attributes of a dataset. Settings
    and caches, which may differ between ranks, are left out."""
    values = vars(dataset) if hasattr(dataset, "__dict__") else {"items": dataset}
    data: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Dataset) and depth < 4:
            data |= {f"{name}.{inner}": each for inner, each in data_of(value, depth + 1).items()}
        elif _is_data(value):
            with suppress(_Unreadable):
                data[name] = _text_of(value)
    return data


def _is_data(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return len(value.shape) > 0 and len(value) >= LEAST_ITEMS
    if isinstance(value, list | tuple):
        first = value[:MOST_SAMPLES]
        is_held = len(value) >= LEAST_ITEMS or any(map(_is_data, first))
        return is_held and not any(each is None for each in first)
    return bool(isinstance(value, dict) and value) and all(
        isinstance(name, str) and _is_data(each) for name, each in value.items()
    )


def held_items(dataset: Any, depth: int = 0) -> int:
    """Return the length of the longest sequence in the attributes of an iterable dataset."""
    sizes = [0]
    for each in getattr(dataset, "__dict__", {}).values():
        if isinstance(each, list | tuple | np.ndarray) or (isinstance(each, Tensor) and each.dim()):
            sizes.append(len(each))
        elif isinstance(each, Dataset) and depth < 3:
            sizes.append(held_items(each, depth + 1))
    return max(sizes)


class _Unreadable(Exception):
    """The dataset has values that cannot be read, and that may differ between ranks."""


def _held_by(owner: Any, depth: int = 0) -> str:
    # a dataset of the datasets library
    if isinstance(fingerprint := getattr(owner, "_fingerprint", None), str):
        return fingerprint
    return ";".join(
        f"{name}={_text_of(value, depth + 1)}" for name, value in sorted(vars(owner).items())
    )


def _text_of(value: Any, depth: int = 0, *, is_item: bool = False) -> str:
    if isinstance(value, Tensor):
        return _digest([value.detach().cpu()])
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufUS":
        flat = np.asarray(value).reshape(-1)
        # sampled before it is copied: it may be a memory-mapped file larger than memory
        taken = flat[:: max(1, -(-flat.nbytes // MOST_BYTES))]
        return short_digest(f"{flat.shape}".encode() + taken.tobytes())
    if isinstance(value, str | int | float | bool | bytes | None):
        return repr(value)
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, list | tuple) and depth < 8:
        some = value[:: max(1, len(value) // MOST_SAMPLES)]
        items = [_text_of(each, depth + 1, is_item=True) for each in some]
        return f"{len(value)}:{','.join(items)}"
    if isinstance(value, dict) and depth < 8:
        pairs = ((key, _text_of(each, depth + 1, is_item=True)) for key, each in value.items())
        return ",".join(f"{key}:{text}" for key, text in pairs)
    if isinstance(value, Dataset) and depth < 8:
        return _held_by(value, depth)
    if isinstance(fingerprint := getattr(value, "_fingerprint", None), str):
        return fingerprint
    # a table, or an item of a collection
    if (is_item or hasattr(value, "__len__")) and not callable(value):
        raise _Unreadable
    return type(value).__name__
