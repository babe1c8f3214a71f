"""Digests of some samples of a dataset, by which ranks find out that their data differ. Cheap for any dataset."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base.errors import DataError

SAMPLES = 16
"""Most samples of a dataset that are digested."""
SECONDS = 0.5
"""No further sample is fetched after this time. Ranks compare the samples that all of them have digested."""
_PARTS = 64  # parts of a sample that have a digest each
_REST = f" beyond its first {_PARTS} parts"
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))


class DigestRequest:
    """A request for the digests of some samples, instead of a microbatch."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of samples as one process fetched them."""

    samples: list[tuple[str, dict[str, str]]]
    """The samples' names, and for each the digests of its parts by their paths: `[0].label`."""
    changing: str | None
    """The first part of a sample that differed when the sample was fetched again. None: it had the same bits."""

    @classmethod
    def of(cls, names: Iterable[str], fetch: Callable[[int], Any]) -> Digests:
        """Fetch samples one after another, and the first one again. `fetch`: given the position among `names`."""
        began = time.monotonic()
        samples: list[tuple[str, dict[str, str]]] = []
        for position, name in enumerate(names):
            samples.append((name, digest_parts(fetch(position))))
            if time.monotonic() - began > SECONDS:
                break
        again = digest_parts(fetch(0))
        return cls(samples, difference(samples[0][1], again))


def spread(length: int) -> list[int]:
    """Return up to `SAMPLES` indices of a dataset: the first, the last, and others evenly between them."""
    count = min(SAMPLES, length)
    indices = [place * (length - 1) // max(count - 1, 1) for place in range(count)]
    return [*indices[:1], *indices[:0:-1]]


def digest_parts(sample: Any) -> dict[str, str]:
    """Return the digest of each part of a sample, by its path. Of an object of an unknown class, that is its class."""
    found: dict[str, str] = {}
    rest = hashlib.blake2b(digest_size=8)
    for path, content in _parts(sample, ""):
        if len(found) < _PARTS:
            digest = hashlib.blake2b(digest_size=8)
            for piece in content:
                digest.update(piece)
            found[path] = digest.hexdigest()
        else:
            for piece in content:
                rest.update(piece)
            found[_REST] = rest.hexdigest()
    return found


def difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return the path of the first part that differs, or that one of the two lacks."""
    return next((path for path in {**one, **other} if one.get(path) != other.get(path)), None)


def check_same(name: str, everyone: Sequence[Digests | None]) -> None:
    """Raise `DataError` if two ranks have other samples. `everyone`: each rank's digests. `name`: the dataset's."""
    known = [(rank, found.samples) for rank, found in enumerate(everyone) if found is not None]
    for rank, samples in known[1:]:
        first, expected = known[0]
        for (sample, parts), (given, given_parts) in zip(expected, samples, strict=False):
            if sample != given:
                raise DataError(
                    f"{name} has {sample} on rank {first} where rank {rank} has {given}: their lengths differ; all ranks have one "
                    "dataset, of which each computes a part; make the same dataset on every rank, whole"
                )
            if (part := difference(parts, given_parts)) is not None:
                raise DataError(
                    f"{name}: {sample}{part} differs between rank {first} and rank {rank}; all ranks have one dataset, of which each "
                    "computes a part, so every rank must make the same: seed what is drawn (torch.Generator().manual_seed(0), also for "
                    "random_split), sort what is listed (sorted(os.listdir(folder))), and leave rank and clock out of it"
                )


def check_unchanged(name: str, saved: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> None:
    """Raise `DataError` if a sample is not what it was when a checkpoint was saved. Digests of parts, by sample."""
    for sample, parts in now.items():
        if sample in saved and (part := difference(saved[sample], parts)) is not None:
            raise DataError(
                f"{name}: {sample}{part} is not what it was when the checkpoint was saved; a resumed run goes on with the same data; "
                "restore it, allow the change (--allow-change data, allow_change=['data']), or choose another run directory"
            )


def changing(name: str, everyone: Sequence[Digests | None]) -> str | None:
    """Return in words which sample was another one when it was fetched again; None if none was."""
    for rank, found in enumerate(everyone):
        if found is not None and found.changing is not None:
            return (
                f"{name}: {found.samples[0][0]}{found.changing} on rank {rank} has other bits each time that it is fetched; a sample "
                "follows from its index, and from the default generators of python, numpy and torch, which are seeded before each sample"
            )
    return None


def _parts(value: Any, path: str) -> Iterator[tuple[str, Iterable[bytes]]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _parts(part, f"{path}[{name!r}]")
    elif isinstance(value, list | tuple) and not all(isinstance(part, _PLAIN) for part in value):
        for index, part in enumerate(value):
            yield from _parts(part, f"{path}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _parts(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, _content(value)


def _content(value: Any) -> Iterable[bytes]:
    if isinstance(value, Tensor):
        dense = value.layout is torch.strided and not value.is_quantized and not value.is_meta
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if dense:
            yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(isinstance(part, _PLAIN) for part in value)):
        yield f"{type(value).__qualname__} {value!r}".encode()
    elif isinstance(value, Set):
        yield f"{type(value).__qualname__} {sorted(map(repr, value))}".encode()
    elif isinstance(array := _as_array(value), np.ndarray) and array.dtype != object:
        yield f"{array.dtype} {array.shape}".encode()
        yield array.tobytes()
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__}".encode()


def _as_array(value: Any) -> Any:
    """Return an array of arrays and images; None for other objects."""
    if isinstance(value, np.ndarray):
        return value
    return np.asarray(value) if hasattr(value, "__array_interface__") or hasattr(value, "__array__") else None
