"""The numbers that a forward or a loss reads from tensors into Python. If ranks divide a sequence's
tokens, `if x.sum() > 0` would decide by a rank's tokens only. All ranks must read the same number.
Counts of chosen tokens may differ (`count_reads.py`)."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.base.errors import RecipeError
from lockstep.comm.world import World
from lockstep.model.context.calls import is_call_of_model, line_of
from lockstep.model.context.chunk_axis import ChunkAxis
from lockstep.model.context.count_reads import PartCounts, numbers_in
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.part_digests import PartDigests
from lockstep.model.host_values import ARRAYS, READS, functions_named

MOST_NAMED = 1000
"""Largest number of a forward's reads that are kept for error messages."""
_COUNT = "_lockstep_count"
_COUNTING = functions_named(
    *("any", "all", "nonzero", "count_nonzero", "bincount", "histc", "unique", "argwhere"),
    *("unique_consecutive", "searchsorted"),
)
_GIVE_COUNTS = ARRAYS | {Tensor.__contains__}
"""Functions of torch that return counts to Python. The counts may differ between ranks."""
_SHAPED = functions_named("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select")
_SUMS = functions_named("sum", "cumsum")
_COMPARISONS = functions_named(
    *("gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal"),
    *("__gt__", "__lt__", "__ge__", "__le__", "__eq__", "__ne__", "not_equal"),
)


class Read(NamedTuple):
    place: str
    value: str


class PartReads:
    """The numbers that a forward (or a loss) of one rank's or one chunk's tokens has read into
    Python."""

    def __init__(self, counts: PartCounts | None = None) -> None:
        self.reads: list[Read] = []
        self.counts = counts
        self.digest = hashlib.blake2b()
        """The digest of the numbers that must be the same on all ranks."""
        self._has_counts = False

    def note(self, function: Any, args: Any, result: Any, caller: FrameType) -> None:
        """Add the result of a call of torch that reads a number into Python."""
        if function in READS:
            if any(map(_is_count, args)) or _is_several(result):
                self._note_count(result, caller)
            else:
                self._note_read(result, caller)
        elif function in _GIVE_COUNTS:
            self._note_count(result, caller)
        elif function in _COUNTING or (
            _is_of_integers(args)
            if function in _SUMS
            else self._has_counts and _is_of_counts(function, args)
        ):
            self._mark(result)
        if self.counts is not None and _is_shape_a_count(function, args):
            self._note_count(_shapes_of(result), caller)

    def _note_read(self, value: Any, caller: FrameType) -> None:
        if is_call_of_model(caller):
            self._add(Read(line_of(caller), repr(value)))

    def _note_count(self, value: Any, caller: FrameType) -> None:
        if self.counts is not None and is_call_of_model(caller):
            self.counts.note(line_of(caller), value)

    def _add(self, read: Read) -> None:
        self.digest.update("\n".join(read).encode())
        if len(self.reads) < MOST_NAMED:
            self.reads.append(read)

    def join(self, other: PartReads) -> None:
        if other.reads != self.reads:
            for read in other.reads:
                self._add(read)

    def _mark(self, result: Any) -> None:
        self._has_counts = True
        for each in _tensors_of(result if isinstance(result, tuple | list) else (result,)):
            setattr(each, _COUNT, True)


class Noting(TorchFunctionMode):
    def __init__(self, part: PartReads) -> None:
        super().__init__()
        self._part = part

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._part.note(func, args, result, sys._getframe(1))
        return result


def noting(function: Callable[[Any, Any], Any], part: PartReads) -> Callable[[Any, Any], Any]:
    is_first = True

    def noted(*args: Any) -> Any:
        nonlocal is_first
        of_call = part if is_first else PartReads(part.counts)
        is_first = False
        with Noting(of_call):
            result = function(*args)
        if of_call is not part:
            part.join(of_call)
        return result

    return noted


class HostReads(PartDigests):
    """Collects the numbers that a step's forwards and losses read into Python. The numbers are
    compared between the ranks that divide a sequence's tokens."""

    def __init__(self, world: World, *, is_summed: bool = True) -> None:
        super().__init__(world, is_summed=is_summed)
        self._layout: TokenLayout
        self._forwards = 0
        self._reads: dict[tuple[int, int], list[Read]] = {}
        self._before = self._reads

    def begin(self) -> int:
        """Begin a forward or a call of the loss, and return its number in the step. Every rank of
        the axis must call this method."""
        self._forwards += 1
        return self._forwards

    def end_part(self, forward: int, layout: TokenLayout, part: PartReads) -> None:
        if layout.world.size > 1 and part.reads:
            self._layout = layout
            self.add(forward, layout, part.digest)
            self._reads[forward, layout.world.rank] = part.reads

    def end_step(self) -> None:
        self._before, self._reads = self._reads, {}
        self.clear()
        self._forwards = 0

    def difference(self) -> str | None:
        """Return the error text for the first number in the last step that two ranks (or chunks)
        have read differently. Every rank of `world` must call this method."""
        mine = [[*key, reads] for key, reads in self._before.items()]
        everyone = [each for theirs in self._world.gather_values(mine) for each in theirs]
        forwards: dict[int, dict[int, list[Read]]] = {}
        for forward, place, reads in everyone:
            forwards.setdefault(forward, {})[place] = [Read(*each) for each in reads]
        for _, parts in sorted(forwards.items()):
            first, *others = sorted(parts)
            for other in others:
                for one, two in zip_longest(parts[first], parts[other]):
                    if one != two:
                        return self._explained({first: one, other: two})
        return None

    def _explained(self, reads: dict[int, Read | None]) -> str:
        layout = self._layout
        is_chunked = isinstance(layout.world, ChunkAxis)
        found = [
            f"{read.place}, gives {read.value} on"
            f" {f'chunk {part}' if is_chunked else f'rank {self.ranks[part]}'}"
            for part, read in reads.items()
            if read is not None
        ]
        return (
            f"under {layout.cut_by} the model, or its loss, reads a number of some of the tokens:"
            f" {' and '.join(found)}; one process reads the number of all tokens, and a branch on"
            " it computes another model; decide for each token by itself (torch.where); for"
            " experts, skip those that no token has chosen (chosen.any()); leave a number that is"
            f" only logged in its tensor (x.detach()); or {layout.otherwise}"
        )

    def error(self, difference: str | None) -> RecipeError:
        return RecipeError(
            difference
            or "the model reads a number that differs between the ranks; decide for each token by"
            " itself (torch.where)"
        )


def _tensors_of(values: Any) -> Iterator[Tensor]:
    return (each for each in values if isinstance(each, Tensor))


def _is_count(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(value, _COUNT)


def _is_of_counts(function: Any, args: Any) -> bool:
    if function in _COMPARISONS:
        return all(map(_is_count_or_zero, args))
    return any(map(_is_count, args))


def _is_count_or_zero(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, int) and value == 0)


def _is_of_integers(args: Any) -> bool:
    first = args[0] if args else None
    return isinstance(first, Tensor) and not (first.is_floating_point() or first.is_complex())


def _is_several(value: Any) -> bool:
    return isinstance(value, list) and len(list(numbers_in(value))) != 1


def _shapes_of(result: Any) -> list[tuple[int, ...]]:
    several = result if isinstance(result, tuple | list) else (result,)
    return [tuple(each.shape) for each in _tensors_of(several)]


def _is_shape_a_count(function: Any, args: Any) -> bool:
    if function is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(each, Tensor) and each.dtype is torch.bool for each in index)
    return function in _SHAPED or (function is torch.where and len(args) == 1)
