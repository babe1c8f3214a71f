"""Finds the calls of torch that must change if a rank has only some of the tokens, and the dim of
tokens in each call. The sizes in forwards of two lengths show the dim."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.model.context.active import active
from lockstep.model.context.draws import draws_by_default, shape_of
from lockstep.model.pipeline.boundary import Around

Kind = Literal["attention", "arange", "slice", "draw"]
NOT_TOKENS: Final = -1
"""The dim of a call whose sizes do not depend on the length of the sequence."""
NOT_THE_MODEL = ("torch.distributed.", "lockstep.")
"""Prefixes of Python modules whose slices of tensors do not belong to the model."""
SHARDED = "lockstep.model.tensor."
OTHERWISE: Final = -2
"""The dim of a call whose sizes depend on the length of the sequence if no single size equals the
length."""


Site = tuple[Kind, str, int]


class Call(NamedTuple):
    """A call of torch whose sizes may depend on the length of the sequence."""

    site: Site
    sizes: tuple[int, ...]
    table: tuple[int, ...] = ()


Dims = Mapping[Site, Sequence[int]]


def call_of(
    function: Any, args: Sequence[Any], keywords: Mapping[str, Any], caller: FrameType
) -> Call | None:
    """Return None for a call that does not change if a rank has only some of the tokens."""
    if function is torch.Tensor.__getitem__:
        # FSDP2 slices gathered tensors, in some forwards more often than in others
        if not is_call_of_model(caller) or (index := as_slices(*args)) is None:
            return None
        extents = tuple(map(_extent, index))
        return Call(_site("slice", caller), extents, tuple(args[0].shape)) if any(extents) else None
    if function is F.scaled_dot_product_attention:
        query, key = (_argument(args, keywords, *each) for each in ((0, "query"), (1, "key")))
        return Call(_site("attention", caller), (query.shape[-2], key.shape[-2]))
    if function is torch.arange:
        span = arange_span(args, keywords)
        return None if span is None else Call(_site("arange", caller), (len(span),))
    if draws_by_default(function, args, keywords):
        return Call(_site("draw", caller), tuple(shape_of(function, args, keywords)))
    return None


def is_call_of_model(caller: FrameType) -> bool:
    name = outside_modes(caller).f_globals.get("__name__", "")
    return not name.startswith(NOT_THE_MODEL)


def _site(kind: Kind, caller: FrameType) -> Site:
    frame = outside_modes(caller)
    # the first of several calls with sharded heads has another line in lockstep's code than the
    # rest
    while frame.f_globals.get("__name__", "").startswith(SHARDED) and frame.f_back is not None:
        frame = outside_modes(frame.f_back)
    return kind, frame.f_code.co_filename, frame.f_lineno


def outside_modes(frame: FrameType) -> FrameType:
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def line_of(caller: FrameType) -> str:
    """Return the file and line of the model's code that made a call."""
    frame = outside_modes(caller)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"


def _argument(args: Sequence[Any], keywords: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else keywords[name]


def arange_span(args: Sequence[Any], keywords: Mapping[str, Any]) -> range | None:
    """Return the integers that a call of `torch.arange` makes. Returns None unless the step is
    1."""
    if not args:
        args = [keywords["start"]] if "start" in keywords else [0]
        args = [*args, keywords["end"]]
    elif len(args) == 1:
        args = [args[0], keywords["end"]] if "end" in keywords else [0, args[0]]
    step = args[2] if len(args) > 2 else keywords.get("step", 1)
    start, end = args[:2]
    is_whole = all(isinstance(each, int) for each in (start, end)) and step == 1
    return range(start, end) if is_whole and "out" not in keywords else None


def as_slices(table: Tensor, index: Any) -> tuple[int | slice, ...] | None:
    given = index if isinstance(index, tuple) else (index,)
    places = [place for place, each in enumerate(given) if each is Ellipsis]
    if len(places) == 1:
        (place,) = places
        rest = (slice(None),) * (table.dim() - len(given) + 1)
        given = (*given[:place], *rest, *given[place + 1 :])
    is_simple = all(type(each) in (int, slice) for each in given)
    return given if is_simple and len(given) <= table.dim() else None


def _extent(index: int | slice) -> int:
    if isinstance(index, int) or not isinstance(index.stop, int) or index.step not in (None, 1):
        return 0
    start = index.start or 0
    return max(0, index.stop - start) if index.stop >= 0 and start >= 0 else 0


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Site, list[Call]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        sequence = active()
        if sequence is None or not sequence.is_handled:
            call = call_of(func, args, keywords, sys._getframe(1))
            if call is not None:
                self.calls.setdefault(call.site, []).append(call)
        return func(*args, **keywords)


def find_dims(
    forward: Callable[[int, Around], object], lengths: tuple[int, int]
) -> dict[int, Dims]:
    """Run the model's forward on sequences of two lengths, and compare the sizes. Returns the dims
    of each pipeline stage on this rank."""
    recorded = []
    for length in lengths:
        recorders: dict[int, _Recorder] = defaultdict(_Recorder)
        forward(length, recorders.__getitem__)
        recorded.append(recorders)
    short, long = recorded
    return {stage: _dims(short[stage].calls, long[stage].calls, lengths) for stage in short}


def _dims(
    short: Mapping[Site, Sequence[Call]],
    long: Mapping[Site, Sequence[Call]],
    lengths: tuple[int, int],
) -> Dims:
    return {
        site: [
            _dim(one, other, lengths)
            for one, other in zip(short.get(site, []), long.get(site, []), strict=False)
        ]
        for site in {**short, **long}
    }


def _dim(short: Call, long: Call, lengths: tuple[int, int]) -> int:
    if short == long:
        return NOT_TOKENS
    if len(short.sizes) != len(long.sizes):
        return OTHERWISE
    if short.site[0] == "attention":
        is_tokens = (short.sizes, long.sizes) == ((lengths[0],) * 2, (lengths[1],) * 2)
        return 2 if is_tokens else OTHERWISE
    sizes = zip(short.sizes, long.sizes, strict=True)
    dims = [dim for dim, pair in enumerate(sizes) if pair == lengths]
    if short.site[0] == "slice":
        # a slice of a tensor that itself has the tokens takes some of them; it is no table of
        # positions
        dims = [dim for dim in dims if short.table[dim] == long.table[dim]]
        return dims[0] if len(dims) == 1 else NOT_TOKENS
    return dims[0] if len(dims) == 1 else OTHERWISE
