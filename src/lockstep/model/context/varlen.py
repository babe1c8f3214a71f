from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Bounds(NamedTuple):
    """The bounds of the documents to which a row's queries belong, in the format of
    `varlen_attn`."""

    queries: list[int]
    """Cumulative sums, from 0, of the number of queries in each document."""
    keys: list[int]
    seen: range
    """The indices in the row of the keys that the queries may attend to."""


def bounds(lengths: Iterable[int], span: range, *, is_causal: bool) -> Bounds:
    """Return the bounds of a span's queries and of their keys. The kernel aligns the last query of
    a document with the document's last key. Causal attention gets the keys up to the end of the
    span."""
    queries, keys = [], []
    for begin, end in pairwise(accumulate(lengths, initial=0)):
        last = min(end, span.stop)
        own = range(max(begin, span.start), last)
        if own:
            queries.append(own)
            keys.append(range(begin, last if is_causal else end))
    return Bounds(_sums(queries), _sums(keys), range(keys[0].start, keys[-1].stop))


def _sums(ranges: Sequence[range]) -> list[int]:
    return list(accumulate(map(len, ranges), initial=0))


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[Sequence[int]],
    spans: Sequence[range],
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The tensors have the shape (samples, heads, tokens, features)."""
    from torch.nn.attention.varlen import varlen_attn  # registers operators

    def attend(of: Bounds, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own, seen = (
            torch.tensor(sums, dtype=torch.int32, device=query.device)
            for sums in (of.queries, of.keys)
        )
        window = (-1, 0) if is_causal else (-1, -1)
        longest = map(_longest, (of.queries, of.keys))
        options: Any = {"scale": scale, "window_size": window, "enable_gqa": enable_gqa}
        return varlen_attn(query, key, value, own, seen, *longest, **options)  # type: ignore[return-value]  # without return_aux

    # (samples, tokens, heads, features)
    by_token = [each.transpose(1, 2) for each in (query, key, value)]
    tokens = key.shape[2]
    if list(spans) == [range(tokens)]:
        flat = range(len(query) * tokens)
        whole = bounds(chain.from_iterable(lengths), flat, is_causal=is_causal)
        output = attend(whole, *(each.flatten(0, 1) for each in by_token))
        return output.view(len(query), tokens, *output.shape[1:]).transpose(1, 2)
    rows = [
        torch.cat([*_parts(attend, row, own, spans, is_causal=is_causal)])
        for *row, own in zip(*by_token, lengths, strict=True)
    ]
    return torch.stack(rows).transpose(1, 2)


def _parts(
    attend: Callable[..., Tensor],
    row: Sequence[Tensor],
    lengths: Sequence[int],
    spans: Sequence[range],
    *,
    is_causal: bool,
) -> Iterable[Tensor]:
    """Yield the attention of each span of a row. The keys of a span are views of the row's keys,
    because the backward recomputes the row's keys."""
    query, key, value = row
    for part, span in zip(torch.split(query, [*map(len, spans)]), spans, strict=True):
        if span:
            of = bounds(lengths, span, is_causal=is_causal)
            seen = slice(of.seen.start, of.seen.stop)
            yield attend(of, part, key[seen], value[seen])


def _longest(sums: Sequence[int]) -> int:
    return max(after - before for before, after in pairwise(sums))
