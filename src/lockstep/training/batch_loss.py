"""A loss over the whole global batch, such as CLIP's, with the memory of one microbatch.

The method is gradient caching (Gao et al., "Scaling Deep Contrastive Learning Batch Size under
Memory Limited Setup", 2021). A first forward without gradients collects the outputs of all
microbatches. A second forward, with a backward, runs for each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lockstep.assignment import MicrobatchAssignment
from lockstep.base.dtypes import dtype_name
from lockstep.base.errors import DataError, LossError
from lockstep.base.nested import map_tensors
from lockstep.comm.gather import samples_in_order
from lockstep.comm.torch_collectives import CollectiveCalled, as_one_process
from lockstep.comm.world import World
from lockstep.data.loader import Microbatch
from lockstep.recipe.recipe import Gathered, Sum
from lockstep.training.microbatches import Spans

Columns = tuple[Tensor, ...]
"""Tensors that `ls.Gathered.collect` returned for one microbatch, with one row per sample."""


def checked_columns(what: str, collected: Any, samples: int) -> Columns:
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
                " one row per sample; of tokens collect each sample's counts, such as"
                " right.sum(1) and mask.sum(1)"
            )
    return tensors


def gather_columns(
    data: World,
    assignment: MicrobatchAssignment,
    what: str,
    parts: Mapping[int, Columns],
    sizes: Sequence[int],
) -> list[Tensor]:
    """Concatenate the rows of all microbatches on the CPU, in the order of the samples. Every rank
    of `data` must call this function."""
    mine, count = list(parts.values()), _count(data, what, parts)
    return [
        samples_in_order(
            torch.cat([part[i] for part in mine]).cpu() if mine else None, sizes, assignment, data
        )
        for i in range(count)
    ]


def _count(data: World, what: str, parts: Mapping[int, Columns]) -> int:
    kinds = {
        index: [[dtype_name(tensor.dtype), list(tensor.shape[1:])] for tensor in part]
        for index, part in parts.items()
    }
    (first, before), *others = distinct_kinds(data, kinds)
    if others:
        index, kind = others[0]
        raise DataError(
            f"{what} collected {_words(kind)} from microbatch {index}, and {_words(before)} from"
            f" microbatch {first}; the rows of all samples are concatenated, so they must have one"
            " dtype and one shape: pad them to one width for all microbatches, or collect one"
            " number per sample"
        )
    return len(before)


def distinct_kinds(data: World, kinds: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """Return (first microbatch with the value, value) for each distinct value of all ranks. Every
    rank of `data` must call this function."""
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


WHAT = "the batch loss"


class BatchLoss:
    """A loss over the whole global batch. Call the object for each microbatch, after `collect`. The
    call returns a loss term that carries the microbatch's part of the gradient."""

    def __init__(
        self, loss: Gathered, spans: Spans, current: Callable[[], Microbatch], *, watched: bool
    ) -> None:
        self._watched = watched
        self._loss = loss
        self._spans = spans
        self._current = current
        self._value = 0.0
        self._gradients: list[Tensor | None] = []

    def collect(
        self,
        data: World,
        assignment: MicrobatchAssignment,
        batches: Iterator[tuple[Microbatch, Any]],
        call: Callable[[Any], Any],
        autocast: AbstractContextManager[Any],
    ) -> None:
        """Every rank must call this method."""
        parts: dict[int, Columns] = {}
        with torch.no_grad():
            for item, batch in batches:
                with autocast:
                    # the model may change the batch in place
                    copied = map_tensors(batch, Tensor.clone)
                    columns = checked_columns(
                        WHAT, self._loss.collect(call(copied), copied), item.size
                    )
                if not item.is_dummy:
                    parts[item.index] = columns
        columns_of_all = gather_columns(
            data, assignment, WHAT, parts, [stop - start for start, stop in self._spans]
        )
        self._differentiate([column.to(data.device) for column in columns_of_all], autocast)

    def _differentiate(self, columns: list[Tensor], autocast: AbstractContextManager[Any]) -> None:
        with torch.enable_grad(), autocast:
            # In half precision, the gradients of rows could underflow, because they are not yet
            # scaled.
            leaves = [
                column.float() if column.dtype in (torch.float16, torch.bfloat16) else column
                for column in columns
            ]
            for leaf in leaves:
                leaf.requires_grad_(leaf.is_floating_point())
            try:
                with as_one_process(watched=self._watched):
                    loss = self._loss.compute(*leaves)
            except CollectiveCalled as error:
                raise LossError(
                    f"{WHAT} calls {error} of torch.distributed in its compute; every rank calls"
                    " compute with the rows of all samples, so these would be counted once per"
                    " rank; leave it out"
                ) from None
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = (
                f"shape {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else f"a {type(loss).__name__}"
            )
            raise LossError(
                f"{WHAT} computed {found}; it must be a scalar tensor that depends on the"
                " collected rows; take its mean() or sum()"
            )
        learning = [leaf for leaf in leaves if leaf.requires_grad]
        found_gradients = iter(torch.autograd.grad(loss, learning, allow_unused=True))
        self._gradients = [next(found_gradients) if leaf.requires_grad else None for leaf in leaves]
        self._value = float(loss.detach())

    def __call__(self, output: Any, batch: Any) -> Sum:
        item = self._current()
        start, stop = self._spans[item.index]
        columns = checked_columns(WHAT, self._loss.collect(output, batch), item.size)
        terms = [
            (c * g[start:stop].to(c.device)).sum()
            for c, g in zip(columns, self._gradients, strict=True)
            if g is not None
        ]
        total = torch.stack(terms).sum()
        # As the value of the loss, microbatch 0 records the whole loss, and the others record 0.
        return Sum(total - total.detach() + (self._value if item.index == 0 else 0.0))
