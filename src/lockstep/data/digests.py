"""Digests of a few samples of a dataset, to detect that the ranks' datasets differ, or that samples
have changed since a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.base import contents
from lockstep.base.contents import Reader
from lockstep.base.counters import Numbers, changed_each_time
from lockstep.base.errors import DataError, first_few

SAMPLES = 16
SECONDS = 0.5
"""Time for fetching a rank's samples. Ranks compare only the samples that all ranks have
fetched."""
COLLATIONS = 5
COLLATED = 4
_PARTS = 64  # most parts of a sample that have their own digest
_UNREAD = "not read"  # instead of a digest


@dataclass(frozen=True, slots=True)
class DigestRequest:
    again: bool = True
    """True: fetch and collate a second time, to detect random changes."""


@dataclass(frozen=True, slots=True)
class Digests:
    samples: list[tuple[str, dict[str, str]]]
    """Digests of each sample's parts, by path such as `[0].label`."""
    changing: str | None
    """The first part of a sample or batch that differs between two fetches."""
    unread: str | None = None
    """The sample or batch that could not be fetched, and the error."""
    counted: str | None = None
    """Names of the dataset's numeric attributes that each fetch changes."""

    @classmethod
    def of(
        cls,
        names: Iterable[str],
        fetch: Callable[[int], Any],
        collated: Callable[[], Any] | None = None,
        *,
        again: bool = True,
        numbers: Callable[[], Numbers] = dict,
    ) -> Digests:
        before = numbers()
        began = time.monotonic()
        samples: list[tuple[str, dict[str, str]]] = []
        for position, name in enumerate(names):
            samples.append((name, sample_digests(fetch(position))))
            if time.monotonic() - began > SECONDS:
                break
        if not again:
            return cls(samples, None)
        between, counted = numbers(), None
        began = time.monotonic()
        for position, (name, parts) in enumerate(samples):
            if (part := differing_part(parts, sample_digests(fetch(position)))) is not None:
                return cls(samples, f"{name}{part}")
            if time.monotonic() - began > SECONDS:
                break
        else:  # an attribute with the index of the latest sample is equal after the same samples
            counted = first_few(changed_each_time(before, between, numbers())) or None
        of_collate = (None, None) if collated is None else _collated_again(collated)
        return cls(samples, *of_collate, counted)


def _collated_again(collated: Callable[[], Any]) -> tuple[str | None, str | None]:
    """Call `collate` several times, because a random change may not show at once."""
    began = time.monotonic()
    try:
        first = sample_digests(collated())
        for _ in range(COLLATIONS):
            if (part := differing_part(first, sample_digests(collated()))) is not None:
                return f"the batch of collate{part}", None
            if time.monotonic() - began > SECONDS:
                break
    except Exception as error:  # `collate` may accept batches of one size only
        return None, f"whether collate gives the same batch twice ({type(error).__name__}: {error})"
    return None, None


def spread(length: int) -> list[int]:
    """Includes the first and the last sample."""
    count = min(SAMPLES, length)
    indices = [place * (length - 1) // max(count - 1, 1) for place in range(count)]
    return [*indices[:1], *indices[:0:-1]]


def sample_digests(sample: Any) -> dict[str, str]:
    """The digest of a part that cannot be read begins with "not read"."""
    digests, unread = contents.digest_parts(Reader().parts(sample), _PARTS)
    return digests | {path: f"{_UNREAD} {digests[path]}" for path in unread}


def differing_part(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    return next((path for path in {**one, **other} if one.get(path) != other.get(path)), None)


def check_same_samples(
    name: str, everyone: Sequence[Digests], *, lengths_only: bool = False
) -> None:
    known = [(rank, digests.samples) for rank, digests in enumerate(everyone) if digests.samples]
    for rank, samples in known[1:]:
        first, expected = known[0]
        for (sample, parts), (given, given_parts) in zip(expected, samples, strict=False):
            if sample != given:
                raise DataError(
                    f"{name} has {sample} on rank {first} where rank {rank} has {given}: their"
                    " lengths differ; all ranks have one dataset, of which each computes a part;"
                    " make the same dataset on every rank, whole"
                )
            if not lengths_only and (part := differing_part(parts, given_parts)) is not None:
                raise DataError(
                    f"{name}: {sample}{part} differs between rank {first} and rank {rank}; all"
                    " ranks have one dataset, of which each computes a part, so every rank must"
                    " make the same: seed what is drawn (torch.Generator().manual_seed(0), also"
                    " for random_split), sort what is listed (sorted(os.listdir(folder))), and"
                    " leave rank and clock out of it"
                )


def check_unchanged(
    name: str, saved: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> None:
    for sample, parts in now.items():
        if sample in saved and (part := differing_part(saved[sample], parts)) is not None:
            raise DataError(
                f"{name}: {sample}{part} has changed since the checkpoint was saved; a resumed run"
                " needs the same data; restore it (what a hook changes in it, in the hook's"
                " state_dict and load_state_dict), allow the change (--allow-change data,"
                " allow_change=['data']), or choose another run directory"
            )


def changing(name: str, everyone: Sequence[Digests]) -> str | None:
    for rank, digests in enumerate(everyone):
        if digests.changing is not None:
            return (
                f"{name}: {digests.changing} on rank {rank} has other bits each time that it is"
                " fetched; a sample follows from its index, a batch of collate from its samples,"
                " and both from the default generators of python, numpy and torch, which are"
                " seeded before each sample and each batch"
            )
    return None


def counting(name: str, everyone: Sequence[Digests]) -> str | None:
    for rank, digests in enumerate(everyone):
        if digests.counted is not None:
            return (
                f"{name}: each fetch of a sample on rank {rank} changes the dataset's number"
                f" {digests.counted}; each rank and each loader worker would count its own samples;"
                " what changes in the course of training follows from the epoch (set_epoch), or is"
                " set by a hook; if it is for a log, leave it out, or append it to a list"
            )
    return None


def not_compared(name: str, everyone: Sequence[Digests]) -> str | None:
    for rank, digests in enumerate(everyone):
        if digests.unread is not None:
            return f"{name}: {digests.unread} on rank {rank}"
        for sample, parts in digests.samples:
            unread = [
                f"{sample}{path}" for path, digest in parts.items() if digest.startswith(_UNREAD)
            ]
            if unread:
                return f"{name}: {first_few(unread)}"
    return None
