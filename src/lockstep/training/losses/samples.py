"""Counts the samples that a batch holds: a collate function may have left some out, packed or
repeated them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.base.errors import LossError

_LISTS = (list, tuple)


def rows_per_sample(name: str, batch: Any, samples: int) -> int:
    """Return how many rows the batch has for each of the `samples` that were asked for: 1, or more
    if all are repeated (several views). Raises `LossError` if that is no whole number: a mean over
    the rows is then no mean over samples. `name`: of the term that is one. A batch in which nothing
    can be counted is taken at its word."""
    kind = type(batch)  # the common cases, asked for each microbatch
    first = (
        batch[0]
        if kind in _LISTS and batch
        else next(iter(batch.values()), None)
        if kind is dict
        else batch
    )
    if type(first) is Tensor and first.shape[:1] == (samples,):
        return 1
    if (rows := rows_of(batch, samples)) is None or rows == samples:
        return 1
    if rows and rows % samples == 0:
        return rows // samples
    found = f"has {rows} rows" if rows >= 0 else "has nothing with one row a sample"
    raise LossError(
        f"term {name!r} of the loss is a plain scalar, the mean over this microbatch's samples, and"
        f" the batch {found} for {samples} samples, as where collate leaves samples out, filters,"
        f" packs or crops; a mean over what it holds would be weighted as one over {samples};"
        " return ls.Sum(loss * n) with Recipe.weight = batch -> n, what the mean is over (its"
        " rows, or its tokens), or ls.Loss(loss * n, n)"
    )


def rows_of(batch: Any, samples: int) -> int | None:
    """Return the number of samples in a batch for which `samples` were asked: the rows of its
    tensors, or the lengths of its lists. -1: its tensors have unequally many, and nothing has
    `samples`. None: nothing can be counted."""
    if isinstance(batch, Tensor | np.ndarray):
        return len(batch) if batch.ndim else None
    if is_dataclass(batch):
        batch = vars(batch)
    if not isinstance(batch, list | tuple | Mapping):
        return None
    parts = list(batch.values() if isinstance(batch, Mapping) else batch)
    tensors, lists = (
        set(_tensor_rows(parts)),
        {len(part) for part in parts if isinstance(part, list | tuple)},
    )
    if samples in tensors:
        return samples
    if not any(isinstance(part, Tensor | np.ndarray) for part in parts):
        if len(lists) == 1 and all(isinstance(part, list | tuple) for part in parts):
            return lists.pop()  # a list of images and one of targets
        if not isinstance(batch, Mapping) and not lists and parts:
            return len(parts)  # a list of samples, each a dict or a text
    if len(tensors) == 1:
        return tensors.pop()
    if samples in lists or (len(parts) == samples and not isinstance(batch, Mapping)):
        return samples
    return -1 if tensors else None


def _tensor_rows(parts: Iterable[Any]) -> Iterable[int]:
    for part in parts:
        if isinstance(part, Tensor | np.ndarray):
            if part.ndim:
                yield len(part)
        elif isinstance(part, list | tuple):
            yield from _tensor_rows(part)
        elif isinstance(part, Mapping):
            yield from _tensor_rows(part.values())
