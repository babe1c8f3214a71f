"""Attention by torch's FlexAttention, which takes a mask as a function of indices and skips blocks
that the mask hides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.base.torch_private import without_torch_function_modes

Allowed = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A `mask_mod` of torch's FlexAttention."""


def places_of(spans: Iterable[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def allowed_tokens(ids: Tensor | None, places: Tensor, *, is_causal: bool) -> Allowed:
    """Return a mask function that is True for the keys of the query's document."""

    def allowed(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = places[query]
        is_allowed = place >= key if is_causal else place >= 0
        return is_allowed if ids is None else is_allowed & (ids[sample, place] == ids[sample, key])

    return allowed


def block_mask(
    allowed: Allowed, samples: int, queries: int, keys: int, device: torch.device
) -> Any:
    with without_torch_function_modes():
        return _function("create_block_mask", device)(
            allowed, samples, None, queries, keys, device=device
        )


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The tensors have the shape (samples, heads, tokens, features)."""
    compute = _function("flex_attention", query.device)
    # torch cannot compile under a TorchFunctionMode
    with without_torch_function_modes():
        output: Tensor = compute(
            query, key, value, block_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
    return output


@cache
def _function(name: str, device: torch.device) -> Any:
    """Return a function of `torch.nn.attention.flex_attention`, compiled except on a CPU. Only
    tests use a CPU, where compilation is slow."""
    from torch.nn.attention import flex_attention as library

    function = getattr(library, name)
    return function if device.type == "cpu" else torch.compile(function)
