"""Watches data loaders: the samples of each batch, its pass over the data, and the random numbers
that it took."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import random
import sys
import weakref
from collections import Counter, UserDict, deque
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from lockstep.audit.probes.draws import Draws, generator_state
from lockstep.audit.probes.recorder import RecordWriter, guarded, wrap
from lockstep.base import torch_private

MOST_SAMPLES = 512
"""Samples of a batch that are hashed."""
MOST_BYTES = 1 << 16
"""Bytes of a sample's tensor that are hashed; of a larger one, that many are taken evenly."""
LEAST_ITEMS = 8
"""Items from which a list or an array of a dataset counts as its data: a pair of numbers may be the
rank's."""
FETCHES = 3
"""Fetches of a pass whose random states are recorded."""


class Loaders:
    def __init__(self, recorder: RecordWriter, draws: Draws) -> None:
        self._recorder, self._draws = recorder, draws
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count()
        self._lines: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._described: weakref.WeakKeyDictionary[Any, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._passes: dict[int, int] = {}
        self._of: dict[int, tuple[int, int]] = {}  # by the id of an iterator: its loader and pass
        self._indices: dict[int, deque[Any]] = {}
        self._fetches = 0
        self.last: tuple[int, int] | None = None
        """The loader and the pass of the batch that came last, until that pass has come to its
        end."""
        self.last_trained: tuple[int, int] | None = None
        """The same of the batch that came last with gradients enabled, also after the end of its
        pass: an evaluation fetches its batches without them."""
        # batches since the last backward, of passes that go on
        self._since: Counter[tuple[int, int]] = Counter()
        self.state = ""
        """The state of torch's generator when it came."""

    def install(self) -> None:
        guard, (iterator, fetchers) = self._recorder, torch_private.loader_classes()
        wrap(guard, DataLoader, "__init__", after=self._after_init)
        wrap(
            guard,
            DataLoader,
            "__iter__",
            before=lambda _: setattr(self, "_fetches", 0),
            after=self._after_iter,
            around=self._draws.others,
        )
        for name in ("__init__", "_reset"):  # both before indices are drawn ahead for workers
            wrap(guard, iterator, name, before=self._before_indices)
        wrap(guard, iterator, "_next_index", after=self._after_index)
        self._wrap_next(iterator)
        for fetcher in fetchers:
            self._wrap_fetch(fetcher)

    def take(self) -> list[tuple[int, int]]:
        """Return the passes that a backward is of: that of the last batch, and each that gave one
        batch since the last backward. (An evaluation between two backwards gives several, or has
        come to its end.)"""
        last = self.last_trained
        taken = [place for place, count in self._since.items() if count == 1 or place == last]
        self._since.clear()
        return taken or ([last] if last is not None else [])

    def _after_init(self, _: Any, loader: Any, *__: Any, **___: Any) -> None:
        self._lines.setdefault(loader, self._origin())

    def _origin(self) -> str:
        """The line of the loader from which a library (Accelerate, Lightning) makes this one; else
        the user's line."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self._recorder.is_users_file(frame.f_code.co_filename):
            for value in frame.f_locals.values():
                if isinstance(value, DataLoader) and value in self._lines:
                    return self._lines[value]
            frame = frame.f_back
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
        """The description of a dataset when it was first read: it may keep what it has read."""
        if type(dataset).__weakrefoffset__ == 0 or type(dataset).__hash__ is None:
            return describe(dataset)
        if dataset not in self._described:
            self._described[dataset] = describe(dataset)
        return self._described[dataset]

    def _wrap_next(self, kind: Any) -> None:
        original = kind.__next__

        def following(iterator: Any) -> Any:
            try:
                with self._draws.others():
                    batch = original(iterator)
            except StopIteration:
                if (place := self._of.get(id(iterator))) is not None:
                    self._recorder.write("pass_end", loader=place[0], number=place[1])
                    self._since.pop(place, None)
                    self.last = None if self.last == place else self.last
                raise
            guarded(self._recorder, self._after_batch)(batch, iterator)
            return batch

        kind.__next__ = following

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
        indices = index if isinstance(index, list | tuple) else [index]
        numbers = [
            int(each)
            for each in indices
            if isinstance(each, int | np.integer)
            or (isinstance(each, Tensor) and each.numel() == 1)
        ]
        self.last, self.state = place, generator_state()
        if torch.is_grad_enabled():
            self.last_trained = place
            self._since[place] += 1
        self._recorder.write(
            "batch",
            loader=place[0],
            number=place[1],
            indices=numbers if len(numbers) == len(indices) else None,
            samples=digests(batch),
            grad=torch.is_grad_enabled(),
        )

    def _wrap_fetch(self, fetcher: Any) -> None:
        """Note random states before a fetch, where it runs: in a worker, or in the process
        itself."""
        original = fetcher.fetch

        def fetch(this: Any, index: Any) -> Any:
            before = guarded(self._recorder, random_states)() if self._fetches < FETCHES else None
            result = original(this, index)
            if before is not None:
                guarded(self._recorder, self._after_fetch)(before)
            return result

        fetcher.fetch = fetch

    def _after_fetch(self, before: dict[str, str]) -> None:
        after = random_states()
        worker = get_worker_info()
        drawn = {name: state for name, state in before.items() if after.get(name) != state}
        self._fetches += 1
        if drawn:
            self._recorder.write(
                "fetch",
                worker=None if worker is None else worker.id,
                number=self._fetches,
                drawn=drawn,
            )


def length_of(loader: Any) -> int | None:
    """The number of batches of a loader; None for a stream."""
    try:
        return None if isinstance(loader.dataset, IterableDataset) else len(loader)
    except TypeError:
        return None


def random_states() -> dict[str, str]:
    """Digests of the random states of torch, numpy and Python."""
    states = {"torch": generator_state(), "python": f"{hash(random.getstate()[1]):x}"}
    if "numpy.random" in sys.modules:
        kind, keys, place, *_ = np.random.get_state(legacy=True)
        states["numpy"] = hashlib.blake2b(
            np.asarray(keys).tobytes() + f"{kind}{place}".encode(), digest_size=8
        ).hexdigest()
    return states


def digests(batch: Any) -> list[str]:
    """A digest of each sample of a batch, from all its tensors and arrays; of the whole batch where
    they have no common first dimension."""
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
    """A tensor of an array; torch warns of arrays that cannot be written to."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = (
            tensor.contiguous().reshape(-1).view(torch.uint8)
            if tensor.numel()
            else tensor.reshape(-1).to(torch.uint8)
        )
        if len(flat) > MOST_BYTES:
            flat = flat[:: -(-len(flat) // MOST_BYTES)]
        digest.update(flat.numpy().tobytes())
    return digest.hexdigest()


def sampler_settings(loader: Any) -> dict[str, Any]:
    """The settings of a loader's sampler that say which rank has which samples."""
    sampler = loader.sampler
    names = (
        "epoch",
        "shuffle",
        "num_replicas",
        "rank",
        "drop_last",
        "replacement",
        "num_samples",
        "total_size",
        "seed",
    )
    found = {
        name: getattr(sampler, name)
        for name in names
        if isinstance(getattr(sampler, name, None), int | bool)
    }
    return {
        "type": type(sampler).__name__,
        "batch_type": type(loader.batch_sampler).__name__,
        **found,
    }


def describe(dataset: Any) -> dict[str, Any]:
    """A dataset as other ranks can compare it: its kind, its length, and a digest of what it holds.
    The digest is empty if that cannot be read, so that only the contents of batches tell samples
    apart."""
    if isinstance(dataset, Subset):
        inner = describe(dataset.dataset)
        indices = torch.as_tensor(list(dataset.indices), dtype=torch.int64)
        base = inner.pop("subset", None)
        places = [base[each] for each in indices.tolist()] if base is not None else indices.tolist()
        digest = f"{inner['digest']}/{_digest([indices])}"
        if not inner["digest"]:
            digest = ""
        return {
            "whole": inner["digest"],
            "whole_length": inner["length"],
            **inner,
            "length": len(dataset),
            "digest": digest,
            "data": {**inner["data"], "indices": _digest([indices])},
            "subset": places,
        }
    is_iterable = isinstance(dataset, IterableDataset)
    try:
        held_values = _held_by(dataset) if hasattr(dataset, "__dict__") else _held(dataset)
        digest = hashlib.blake2b(held_values.encode(), digest_size=8).hexdigest()
    except _Unreadable:
        digest = ""
    length = len(dataset) if not is_iterable and hasattr(dataset, "__len__") else None
    held = held_items(dataset) if is_iterable else None
    row = {"type": type(dataset).__name__, "iterable": is_iterable, "length": length, "held": held}
    return {**row, "digest": digest, "data": data_of(dataset)}


def data_of(dataset: Any, depth: int = 0) -> dict[str, str]:
    """Digests of the tensors, arrays and lists that a dataset holds, and not of its settings, which
    may be the rank's.

    Left out: dictionaries by number and lists with None, which are caches; few numbers; what cannot
    be read.
    """
    values = vars(dataset) if hasattr(dataset, "__dict__") else {"items": dataset}
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Dataset) and depth < 4:
            found |= {
                f"{name}.{inner}": digest for inner, digest in data_of(value, depth + 1).items()
            }
        elif _is_data(value):
            with suppress(_Unreadable):
                found[name] = _held(value)
    return found


def _is_data(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return len(value.shape) > 0 and len(value) >= LEAST_ITEMS
    if isinstance(value, list | tuple):
        first = value[:MOST_SAMPLES]
        is_held = len(value) >= LEAST_ITEMS or any(map(_is_data, first))
        return is_held and not any(each is None for each in first)
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(name, str) and _is_data(each) for name, each in value.items())
    )


def held_items(dataset: Any, depth: int = 0) -> int:
    """The items that a stream, or what it wraps, holds in its largest sequence; 0 if it holds
    none."""
    values = list(getattr(dataset, "__dict__", {}).values())
    sizes = [
        len(each)
        for each in values
        if isinstance(each, list | tuple | np.ndarray) or (isinstance(each, Tensor) and each.dim())
    ]
    inner = [
        held_items(each, depth + 1) for each in values if isinstance(each, Dataset) and depth < 3
    ]
    return max([*sizes, *inner], default=0)


class _Unreadable(Exception):
    """A dataset holds what cannot be read, and may differ from rank to rank."""


def _held_by(owner: Any, depth: int = 0) -> str:
    # of the datasets library
    if isinstance(fingerprint := getattr(owner, "_fingerprint", None), str):
        return fingerprint
    return ";".join(
        f"{name}={_held(value, depth + 1)}" for name, value in sorted(vars(owner).items())
    )


def _held(value: Any, depth: int = 0, *, is_item: bool = False) -> str:
    """A text of an attribute of a dataset, or of an item of one, equal for equal values."""
    if isinstance(value, Tensor):
        return _digest([value.detach().cpu()])
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufUS":
        flat = np.asarray(value).reshape(-1)
        # before it is copied: it may be a file larger than memory
        taken = flat[:: max(1, -(-flat.nbytes // MOST_BYTES))]
        return hashlib.blake2b(
            f"{flat.shape}".encode() + taken.tobytes(), digest_size=8
        ).hexdigest()
    if isinstance(value, str | int | float | bool | bytes | None):
        return repr(value)
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, list | tuple) and depth < 8:
        step = max(1, len(value) // MOST_SAMPLES)
        return f"{len(value)}:" + ",".join(
            _held(each, depth + 1, is_item=True) for each in value[::step]
        )
    if isinstance(value, dict) and depth < 8:
        return ",".join(
            f"{key}:{_held(each, depth + 1, is_item=True)}" for key, each in value.items()
        )
    if isinstance(value, Dataset) and depth < 8:
        return _held_by(value, depth)
    if isinstance(fingerprint := getattr(value, "_fingerprint", None), str):
        return fingerprint
    # a table, or one of many objects
    if (is_item or hasattr(value, "__len__")) and not callable(value):
        raise _Unreadable
    return type(value).__name__
