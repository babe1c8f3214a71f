from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.base.errors import PlanError, RecipeError
from lockstep.base.torch_private import checkpoints_saved_tensors
from lockstep.model.context.active import ActiveSequence, activate, deactivate
from lockstep.model.context.attention import attention
from lockstep.model.context.calls import (
    NOT_TOKENS,
    OTHERWISE,
    Call,
    Dims,
    Site,
    arange_span,
    as_slices,
    call_of,
)
from lockstep.model.context.draws import DROPOUTS, draw_by_chunk
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.host_reads import PartReads


class SequenceMode(TorchFunctionMode):
    """Makes a model's forward compute only this rank's tokens of each sequence."""

    def __init__(
        self,
        sequence: ActiveSequence,
        dims: Dims,
        *,
        only_draws: bool,
        draws_by_chunk: bool,
        part: PartReads | None = None,
    ) -> None:
        super().__init__()
        self.sequence = sequence
        self._dims = dims
        self._only_draws = only_draws
        self._draws_by_chunk = draws_by_chunk
        self._part = part
        self._has_gradients = torch.is_grad_enabled()

    def __enter__(self) -> SequenceMode:
        activate(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        deactivate()

    def resumed(self, counts: dict[Site, int]) -> SequenceMode:
        sequence = replace(
            self.sequence, counts=dict(counts), is_handled=False, checkpointed_blocks=1
        )
        return SequenceMode(
            sequence,
            self._dims,
            only_draws=self._only_draws,
            draws_by_chunk=self._draws_by_chunk,
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if self.sequence.is_handled:
            return func(*args, **keywords)
        caller = sys._getframe(1)
        call = call_of(func, args, keywords, caller)
        if call is None and self._part is not None:
            result = func(*args, **keywords)
            self._part.note(func, args, result, caller)
            return result
        if call is None or (self._only_draws and call.site[0] != "draw"):
            return func(*args, **keywords)
        if (dim := self._dim_of(call)) == NOT_TOKENS:
            return func(*args, **keywords)
        return self._changed(call, dim, func, args, keywords)

    def _dim_of(self, call: Call) -> int:
        counts = self.sequence.counts
        place = counts.get(call.site, 0)
        counts[call.site] = place + 1
        known = self._dims.get(call.site, [])
        if place < len(known):
            return known[place]
        # as in experts, which get a varying number of tokens
        if self.sequence.layout.local not in call.sizes and set(known) <= {NOT_TOKENS}:
            return NOT_TOKENS
        kind, file, line = call.site
        raise RecipeError(
            f"the model calls {_NAMES[kind]} at line {line} of {file}, for sizes of {call.sizes},"
            f" {place + 1} times or more in one forward, and {len(known)} times in the forwards"
            " that showed which dim is the tokens; each forward must make the same calls; leave out"
            " layers that are skipped at random"
        )

    def _changed(
        self, call: Call, dim: int, function: Any, args: Any, keywords: dict[str, Any]
    ) -> Any:
        layout, documents = self.sequence.layout, self.sequence.documents
        whole = layout.world.size == 1
        if call.site[0] == "draw":
            return self._draw(call, dim, function, args, keywords)
        if dim == OTHERWISE:  # the result is compared with the uncut forward
            return function(*args, **keywords)
        if call.site[0] == "attention":
            dropout = args[4] if len(args) > 4 else keywords.get("dropout_p", 0.0)
            if dropout and not self._draws_by_chunk:
                raise _undeclared(function, layout)
            self._check_recomputation(without_gradients=True)
            return attention(self.sequence, *args, **keywords)
        if whole and documents is None:
            return function(*args, **keywords)
        if call.site[0] == "arange":
            span, made = arange_span(args, keywords), function(*args, **keywords)
            assert span is not None
            return (self.sequence.places() + span.start).to(made)
        table, index = args[0], as_slices(*args)
        assert index is not None
        token_slice = index[dim]
        assert isinstance(token_slice, slice)
        return _rows(table, index, dim, self.sequence.places() + (token_slice.start or 0))

    def _draw(
        self, call: Call, dim: int, function: Any, args: Any, keywords: dict[str, Any]
    ) -> Any:
        layout = self.sequence.layout
        if not self._draws_by_chunk:
            raise _undeclared(function, layout)
        if dim == OTHERWISE or call.sizes[dim] != layout.local:
            raise RecipeError(
                f"the model draws random numbers by {function.__name__} for a tensor of shape"
                f" {call.sizes}, in which no single dim is the tokens of the sequence (here"
                f" {layout.local}); its numbers would depend on the plan; draw for a tensor of"
                " (samples, tokens, features)"
            )
        self._check_recomputation(without_gradients=function in DROPOUTS)
        return draw_by_chunk(function, args, keywords, dim, layout.own_chunks, layout.widths)

    def _check_recomputation(self, *, without_gradients: bool) -> None:
        """Raise `RecipeError` if the model's code uses activation checkpointing, because the
        recomputation would run outside of `SequenceMode`."""
        if self.sequence.checkpointed_blocks:
            return
        is_off = without_gradients and self._has_gradients and not torch.is_grad_enabled()
        if checkpoints_saved_tensors() or is_off:
            raise RecipeError(
                "the model computes attention or dropout in its own torch.utils.checkpoint, or in"
                " torch.no_grad(), and the recipe or the plan cuts sequences"
                f" ({self.sequence.layout.cut_by}); what is computed again in the"
                " backward would not know the sequence; leave the model's checkpointing out, and"
                " give the plan checkpointing=full; freeze parameters by requires_grad_(False)"
            )


def _undeclared(function: Any, layout: TokenLayout) -> PlanError:
    return PlanError(
        f"{layout.cut_by}, and the model draws random numbers by {function.__name__}; each rank"
        " would draw different numbers than one process; give Recipe(sequence=ls.Sequence()):"
        " random numbers are then drawn by chunk, the same under every plan"
    )


_NAMES = {
    "attention": "scaled_dot_product_attention",
    "arange": "torch.arange",
    "slice": "a slice of a table",
    "draw": "random functions",
}


def _rows(table: Tensor, index: tuple[Any, ...], dim: int, places: Tensor) -> Tensor:
    """Return `table[index]`, with the rows of this rank's tokens instead of the rows of all
    tokens."""
    # earlier dims that are indexed by a number are missing in the result
    gone = sum(isinstance(each, int) for each in index[:dim])
    others = tuple(slice(None) if place == dim else each for place, each in enumerate(index))
    rows = table[others]
    dim -= gone
    selected = rows.index_select(dim, places.reshape(-1))
    if places.dim() == 1:
        return selected
    if dim == 0:
        return selected.reshape(*places.shape, *rows.shape[1:])
    if rows.shape[:dim].numel() != 1:
        raise RecipeError(
            f"the model slices a table of shape {tuple(table.shape)} for its positions, and rows of"
            " the batch have other documents; give Recipe.microbatch=1, or take rows of a table of"
            " (positions, features): table[torch.arange(tokens)]"
        )
    return selected.reshape(*places.shape, *rows.shape[dim + 1 :])
