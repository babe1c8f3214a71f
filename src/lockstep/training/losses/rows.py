"""Rows collected from microbatches, one for each sample, and gathered in the order of the
samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lockstep.assignment import MicrobatchAssignment
from lockstep.base.errors import DataError
from lockstep.comm.gather import samples_in_order
from lockstep.comm.world import World

Columns = tuple[Tensor, ...]
"""The tensors that an `ls.Gathered` collected from one microbatch, each with one row per sample."""


def checked_columns(what: str, collected: Any, samples: int) -> Columns:
    """Return what was collected from a microbatch as a tuple. Raises `DataError` unless each tensor
    has one row per sample. `what`: for the message."""
    tensors = tuple(collected) if isinstance(collected, list | tuple) else (collected,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) != samples:
            shape = (
                f"shape {tuple(tensor.shape)}"
                if isinstance(tensor, Tensor)
                else f"a {type(tensor).__name__}"
            )
            raise DataError(
                f"{what} collected {shape} from a microbatch of {samples} samples; each tensor has"
                " one row a sample; of tokens collect each sample's counts, such as right.sum(1)"
                " and mask.sum(1)"
            )
    return tensors


def gather_columns(
    data: World,
    assignment: MicrobatchAssignment,
    what: str,
    parts: Mapping[int, Columns],
    sizes: Sequence[int],
) -> list[Tensor]:
    """All-gather the rows of all microbatches, on the CPU, in the order of the samples. Every rank
    of `data` calls it. `parts`: of this rank's microbatches. `sizes`: samples of each
    microbatch. Raises `DataError` if rows differ."""
    mine, count = list(parts.values()), _count(data, what, parts)
    return [
        samples_in_order(
            torch.cat([part[i] for part in mine]).cpu() if mine else None, sizes, assignment, data
        )
        for i in range(count)
    ]


def _count(data: World, what: str, parts: Mapping[int, Columns]) -> int:
    """The number of tensors that each microbatch has given. Raises `DataError` if dtypes or shapes
    differ."""
    kinds = {
        index: [
            [str(tensor.dtype).removeprefix("torch."), list(tensor.shape[1:])] for tensor in part
        ]
        for index, part in parts.items()
    }
    (first, before), *others = distinct_kinds(data, kinds)
    if others:
        index, found = others[0]
        raise DataError(
            f"{what} collected {_words(found)} from microbatch {index}, and {_words(before)} from"
            f" microbatch {first}; the rows of all samples are concatenated, so they must have one"
            " dtype and one shape: pad them to one width for all microbatches, or collect one"
            " number a sample"
        )
    return len(before)


def distinct_kinds(data: World, kinds: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """(microbatch, kind) of each distinct kind (JSON) on any rank: the first microbatch of that
    kind, in order. Every rank of `data` calls it."""
    everyone = data.gather_values(_firsts(kinds.items()))
    return _firsts(sorted(chain.from_iterable(everyone), key=itemgetter(0)))


def _firsts(kinds: Iterable[tuple[int, Any]]) -> list[tuple[int, Any]]:
    firsts: dict[str, tuple[int, Any]] = {}
    for index, kind in kinds:
        firsts.setdefault(repr(kind), (index, kind))
    return list(firsts.values())


def _words(kinds: list[Any]) -> str:
    return (
        " and ".join(f"{dtype} rows of shape {tuple(shape)}" for dtype, shape in kinds) or "nothing"
    )
