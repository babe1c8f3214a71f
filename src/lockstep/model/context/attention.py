"""`F.scaled_dot_product_attention` over sequences whose tokens are divided among ranks. Rows of
several documents, and dropout that is drawn for each chunk, are supported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from lockstep.base.errors import PlanError, RecipeError
from lockstep.model.context.active import ActiveSequence
from lockstep.model.context.documents import Documents
from lockstep.model.context.draws import seeded_chunks
from lockstep.model.context.exchange import (
    TokenLayout,
    attend_by_heads,
    attend_by_keys,
    chosen_exchange,
)
from lockstep.model.context.flex import (
    allowed_tokens,
    block_mask,
    flex_attention,
    places_of,
)
from lockstep.model.context.kernels import Kernel, computed_dtype, facts
from lockstep.model.context.recomputed_tensors import RecomputedTensors
from lockstep.model.context.varlen import varlen_attention


def attention(
    sequence: ActiveSequence,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The tensors have only this rank's tokens. Every rank of the axis `context` must call this
    function."""
    layout, documents = sequence.layout, sequence.documents
    ranks = layout.world.size
    attend = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=enable_gqa)
    if ranks == 1 and documents is None and not dropout_p:
        return attend(query, key, value, attn_mask=attn_mask, is_causal=is_causal)
    if attn_mask is not None and ranks > 1:
        raise RecipeError(
            "the model gives scaled_dot_product_attention its own mask (attn_mask), which it made"
            f" for a part of the tokens ({layout.cut_by}); write is_causal=True instead of a"
            " causal mask; padding at the end needs no mask where attention is causal; for"
            " documents give Recipe(sequence=ls.Sequence(documents=...))"
        )
    # cast as autocast does for torch's function: dtypes may differ
    query, key, value = (each.to(computed_dtype(each)) for each in (query, key, value))
    if query.dim() == 3:
        query, key, value = (each.unsqueeze(1) for each in (query, key, value))
        options = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return attention(sequence, query, key, value, *options).squeeze(1)
    chunked = ChunkedAttention(attend, sequence, attn_mask, dropout_p, is_causal)
    exchange = _exchange(sequence, query.shape[1], key.shape[1], dropout_p)
    if exchange == "heads":
        return attend_by_heads(layout, query, key, value, chunked.of_all_tokens, chunked.recomputed)
    return attend_by_keys(layout, query, key, value, chunked.of_own_tokens, chunked.recomputed)


def _exchange(
    sequence: ActiveSequence, heads: int, key_heads: int, dropout: float
) -> Literal["keys", "heads"]:
    exchange, ranks = sequence.exchange, sequence.layout.world.size
    if ranks == 1:
        return "keys"
    if exchange == "heads" and dropout:
        raise PlanError(
            f"exchange=heads, and attention with dropout_p={dropout}; a rank that has some of the"
            " heads would draw different masks than one process; leave exchange out, or give"
            " exchange=keys"
        )
    if exchange == "heads" and key_heads % ranks:
        raise PlanError(
            f"exchange=heads on context={ranks}, and attention with {key_heads} heads of keys; each"
            " rank computes equally many of them; leave exchange out, give exchange=keys, or a"
            " context that divides the heads"
        )
    if exchange == "auto" and dropout:
        return "keys"
    return chosen_exchange(exchange, heads=heads, key_heads=key_heads, ranks=ranks)


class ChunkedAttention:
    """Computes the attention of this rank's queries to the keys of all tokens."""

    def __init__(
        self,
        attend: partial[Tensor],
        sequence: ActiveSequence,
        mask: Tensor | None,
        dropout: float,
        is_causal: bool,
    ) -> None:
        self._attend = attend
        self._sequence = sequence
        self._layout: TokenLayout = sequence.layout
        self._documents: Documents | None = sequence.documents
        self._given_mask = mask
        self._dropout = dropout
        self._is_causal = is_causal
        self.recomputed = RecomputedTensors()

    def of_all_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._documents is None:
            self._sequence.chosen.why.setdefault("own", "")
            return self._attend(query, key, value, is_causal=self._is_causal)
        whole = range(self._layout.tokens)
        match self._kernel(query, value, whole_rows=True):
            case "documents":
                return self._documents.by_document(self._document, query, key, value)
            case "mask":
                return self._masked(whole, 0, query, key, value)
            case kernel:
                return self._by(kernel, [whole], query, key, value)

    def of_own_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layout = self._layout
        if layout.world.size == 1 and not self._dropout and self._given_mask is None:
            return self.of_all_tokens(query, key, value)
        if self._documents is not None:
            kernel = self._kernel(query, value, whole_rows=False)
            if kernel != "mask":
                return self._by(kernel, layout.own_spans, query, key, value)
        else:
            self._sequence.chosen.why.setdefault("own", "")
            if not (self._is_causal or self._dropout):
                return self._attend(query, key, value)
        return self.of_own_chunks(query, key, value)

    def of_own_chunks(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layout = self._layout
        parts = torch.split(query, layout.widths, 2)
        places: Iterable[int] = range(len(parts))
        if self._dropout:
            places = seeded_chunks(layout.own_chunks, query.device)
        spans = layout.own_spans
        return self._joined_parts(
            [self._chunk(spans[place], parts[place], key, value) for place in places]
        )

    def _joined_parts(self, parts: Sequence[Tensor]) -> Tensor:
        whole = torch.cat([part.transpose(1, 2) for part in parts], 1).transpose(1, 2)
        copies = torch.split(whole.detach(), [part.shape[2] for part in parts], 2)
        for part, copy in zip(parts, copies, strict=True):
            self.recomputed.add_copy(part, copy)
        return whole

    def _kernel(self, query: Tensor, value: Tensor, *, whole_rows: bool) -> Kernel:
        return self._sequence.chosen.add(
            facts(
                query,
                value,
                dropout=self._dropout,
                whole_rows=whole_rows,
                own_mask=self._given_mask is not None,
            )
        )

    def _by(
        self, kernel: Kernel, spans: Sequence[range], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        documents, causal = self._documents, self._is_causal
        assert documents is not None, "a kernel is chosen for documents"
        options: Any = {name: self._attend.keywords[name] for name in ("scale", "enable_gqa")}
        if kernel == "varlen":
            options["is_causal"] = causal
            return varlen_attention(query, key, value, documents.lengths, spans, **options)
        masks, kind = self._sequence.block_masks, (*spans, causal)
        if kind not in masks:
            places = places_of(spans, query.device)
            allowed = allowed_tokens(documents.ids, places, is_causal=causal)
            masks[kind] = block_mask(allowed, len(query), len(places), key.shape[2], query.device)
        return flex_attention(query, key, value, masks[kind], **options)

    def _document(self, row: int, first: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._attend(query, key, value, is_causal=self._is_causal)

    def _chunk(self, span: range, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not len(span):
            return query
        first = 0
        if self._is_causal:
            if self._documents is not None and query.is_cpu:
                first = self._documents.earliest_key(span.start)
            key, value = key[:, :, first : span.stop], value[:, :, first : span.stop]
        if self._given_mask is not None or self._documents is not None:
            return self._masked(span, first, query, key, value)
        attend = partial(self._attend, query, key, value, dropout_p=self._dropout)
        if not self._is_causal:
            return attend()
        if not span.start:
            return attend(is_causal=True)
        if not query.is_cpu:
            return attend(attn_mask=causal_lower_right(len(span), span.stop))
        return self._masked(span, 0, query, key, value)

    def _masked(self, span: range, first: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = torch.arange(span.start, span.stop, device=query.device)
        keys = torch.arange(first, first + key.shape[2], device=query.device)
        zero = torch.zeros((), dtype=query.dtype, device=query.device)

        def make() -> Tensor:
            allowed = rows[:, None] >= keys if self._is_causal else None
            if self._documents is not None:
                same = self._documents.allowed(rows, keys)
                allowed = same if allowed is None else same & allowed
            return zero if allowed is None else zero.where(allowed, -torch.inf)

        attend = partial(self._attend, query, key, value, dropout_p=self._dropout)
        mask = make()
        if (given := self._given_mask) is not None:
            if given.dtype is torch.bool:
                given = zero.where(given, -torch.inf)
            own_keys = range(first, first + key.shape[2])
            return attend(attn_mask=mask + _of(given, span, own_keys))
        self.recomputed.add(mask, make)
        output = attend(attn_mask=mask)
        self.recomputed.drop(mask)
        return output


def _of(mask: Tensor, rows: range, keys: range) -> Tensor:
    if mask.shape[-2] > 1:
        mask = mask[..., rows.start : rows.stop, :]
    return mask[..., keys.start : keys.stop] if mask.shape[-1] > 1 else mask
