"""Draws a model's random numbers (such as dropout's) separately for each chunk of a sequence. The
numbers do not depend on the rank that has the chunk. The generator of a chunk is seeded with the
chunk's index and one number from the default generator, whose state is the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.base import accelerator
from lockstep.base.torch_private import disable_current_modes
from lockstep.keys import key
from lockstep.model.random_functions import draws

DROPOUTS = frozenset(
    [
        F.dropout,
        torch.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.rrelu,
    ]
)
"""Functions of torch that draw random numbers only in training."""
OF_A_TENSOR = frozenset(
    [
        *DROPOUTS,
        F.gumbel_softmax,
        torch.rand_like,
        torch.randn_like,
        torch.bernoulli,
        torch.poisson,
        Tensor.bernoulli,
        Tensor.bernoulli_,
        Tensor.normal_,
        Tensor.uniform_,
        Tensor.exponential_,
    ]
)
"""Functions of torch that draw one random number for each element of their first argument."""
OF_A_SHAPE = frozenset([torch.rand, torch.randn])


def draws_by_default(function: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return True if a call draws from a default generator."""
    return (
        (function in OF_A_TENSOR or function in OF_A_SHAPE)
        and keywords.get("generator") is None
        and draws(function, args, keywords)
    )


def shape_of(function: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> torch.Size:
    if function in OF_A_SHAPE:
        return torch.Size(_sizes_of(args, keywords))
    given = args[0] if args else keywords["input"]
    return given.shape  # type: ignore[no-any-return]


def _sizes_of(args: Sequence[Any], keywords: Mapping[str, Any]) -> list[int]:
    is_one = bool(args) and isinstance(args[0], list | tuple)
    sizes = keywords["size"] if "size" in keywords else args[0] if is_one else args
    return [int(size) for size in sizes]


def seeded_chunks(chunks: Sequence[int], device: torch.device) -> Iterator[int]:
    """Seed the default generators for one chunk after another, and yield 0, 1, 2, and so on. At the
    end, the generators are in the state after one drawn number. The caller must exhaust the
    iterator."""
    with disable_current_modes():
        number = int(torch.empty((), dtype=torch.int64).random_())
    generators = accelerator.generators_of([device])
    with accelerator.preserved_generators(device):
        for place, chunk in enumerate(chunks):
            for generator in generators:
                generator.manual_seed(key(number, chunk))
            yield place


def draw_by_chunk(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: dict[str, Any],
    dim: int,
    chunks: Sequence[int],
    widths: Sequence[int],
) -> Any:
    if function in OF_A_SHAPE:
        sizes = _sizes_of(args, keywords)
        others = {name: value for name, value in keywords.items() if name != "size"}
        device = torch.device(others.get("device") or torch.get_default_device())
        return torch.cat(
            [
                function([*sizes[:dim], widths[place], *sizes[dim + 1 :]], **others)
                for place in seeded_chunks(chunks, device)
            ],
            dim,
        )
    others = dict(keywords)
    given, *more = args or [others.pop("input")]
    starts = [0, *accumulate(widths)]
    drawn = [
        function(given.narrow(dim, starts[place], widths[place]), *more, **others)
        for place in seeded_chunks(chunks, given.device)
    ]
    in_place = others.get("inplace") or getattr(function, "__name__", "").endswith("_")
    return given if in_place else torch.cat(drawn, dim)
