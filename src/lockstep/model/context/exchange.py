"""Attention over a sequence whose tokens are on several ranks.

`exchange="keys"` gathers keys and values. Each rank computes the attention of its tokens to all
tokens, with any attention function. `exchange="heads"` exchanges tokens for heads by all-to-all
(Jacobs et al., DeepSpeed Ulysses, 2023). Each rank computes the attention of all tokens in some
heads. Both exchanges sum gradients in rank order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.assignment import contiguous_range
from lockstep.base.torch_private import checkpoints_saved_tensors
from lockstep.comm.world import World
from lockstep.model.context.chunk_axis import ChunkAxis
from lockstep.model.context.recomputed_tensors import RecomputedTensors
from lockstep.model.context.stand_in import StandIn, sums_of
from lockstep.sequence import chunks_of, spans

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function that maps query, key and value to the attention. All tensors have the shape (samples,
heads, tokens, features)."""


@dataclass(frozen=True)
class TokenLayout:
    """The division of a sequence's tokens among the ranks of the axis `context`. Chunks of
    consecutive tokens are given to ranks in paired order: first, last, second, last but one, and so
    on. A single rank has the unchanged sequence."""

    tokens: int
    chunks: int
    world: World | ChunkAxis
    """The ranks of the axis. With bitwise numerics, chunks take the place of ranks."""

    def spans_of(self, rank: int) -> tuple[range, ...]:
        if self.world.size == 1:
            return tuple(
                contiguous_range(self.tokens, chunk, self.chunks) for chunk in range(self.chunks)
            )
        return spans(self.tokens, self.chunks, self.world.size, rank)

    @property
    def cut_by(self) -> str:
        is_chunked = isinstance(self.world, ChunkAxis)
        return "numerics=bitwise" if is_chunked else f"context={self.world.size}"

    @property
    def otherwise(self) -> str:
        if not isinstance(self.world, ChunkAxis):
            return (
                "leave context out: shard=N and checkpointing=full make room for long sequences too"
            )
        both = "context and " if self.world.processes.size > 1 else ""
        return f"leave {both}numerics=bitwise out"

    @cached_property
    def own_chunks(self) -> Sequence[int]:
        """The indices of this rank's chunks in the sequence."""
        if self.world.size == 1:
            return range(self.chunks)
        return chunks_of(self.chunks, self.world.size, self.world.rank)

    @cached_property
    def own_spans(self) -> tuple[range, ...]:
        return self.spans_of(self.world.rank)

    @cached_property
    def widths(self) -> list[int]:
        return list(map(len, self.own_spans))

    @cached_property
    def counts(self) -> list[int]:
        return [sum(map(len, self.spans_of(rank))) for rank in range(self.world.size)]

    @property
    def local(self) -> int:
        return self.counts[self.world.rank]

    @cached_property
    def places(self) -> Tensor:
        """The indices of this rank's tokens in the sequence."""
        return self.places_of(self.world.rank)

    def places_of(self, rank: int) -> Tensor:
        return torch.tensor(
            [place for span in self.spans_of(rank) for place in span], device=self.world.device
        )

    @cached_property
    def gathered_places(self) -> Tensor:
        return torch.cat([self.places_of(rank) for rank in range(self.world.size)])

    @cached_property
    def true_order(self) -> Tensor:
        """The indices that sort the gathered tokens of all ranks into the order of the sequence."""
        return torch.argsort(self.gathered_places)

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor if self.world.size == 1 else tensor.index_select(dim, self.places)


def chosen_exchange(
    exchange: Literal["auto", "keys", "heads"], *, heads: int, key_heads: int, ranks: int
) -> Literal["keys", "heads"]:
    """For "auto", return the exchange that sends fewer bytes. With A bytes in one activation, N
    ranks, and g key heads per query head, a rank sends 4 (1 + g) A (N - 1) / N² bytes for `heads`,
    and 6 g A (N - 1) / N for `keys`."""
    if exchange != "auto":
        return exchange
    share = Fraction(key_heads, heads)
    fewer = 4 * (1 + share) / ranks < 6 * share
    return "heads" if fewer and key_heads % ranks == 0 else "keys"


def attend_by_keys(
    layout: TokenLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: Attend,
    recomputed: RecomputedTensors,
) -> Tensor:
    """Every rank must call this function. Autograd does not save the gathered tensors. The backward
    gathers the tensors again."""
    keys, values = key, value
    if layout.world.size > 1:
        whole = gather_keys(layout, key, value)
        keys, values = torch.split(whole, [key.shape[-1], value.shape[-1]], -1)
        if _is_sent(layout):
            recomputed.add(whole, partial(gather_keys, layout, key.detach(), value.detach()))
    if not torch.is_grad_enabled() or checkpoints_saved_tensors():
        return attend(query, keys, values)
    with recomputed:
        return attend(query, keys, values)


def _is_sent(layout: TokenLayout) -> bool:
    """Return False if all chunks are on one process, which needs no exchange of keys."""
    world = layout.world
    return not isinstance(world, ChunkAxis) or world.processes.size > 1


def attend_by_heads(
    layout: TokenLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: Attend,
    recomputed: RecomputedTensors,
) -> Tensor:
    """Every rank must call this function. The number of ranks must divide the number of key heads.
    The backward uses a `StandIn`, so autograd does not save the output for all tokens."""
    world = layout.world
    if world.size == 1:
        return attend(query, key, value)
    assert isinstance(world, World), "chunks of a process exchange keys"
    given = [each.chunk(world.size, 1) for each in (query, key, value)]
    shapes = [[(*_with_tokens(part[0], count),) for part in given] for count in layout.counts]
    received = _exchanged(world, list(zip(*given, strict=True)), shapes)
    # an attention's output has the query's memory order; in this order, models use it without a
    # copy
    whole = [
        torch.cat([part.transpose(1, 2) for part in parts], 1)
        .index_select(1, layout.true_order)
        .transpose(1, 2)
        for parts in zip(*received, strict=True)
    ]
    if not torch.is_grad_enabled() or checkpoints_saved_tensors():
        return _to_tokens(layout, attend(*whole), None)
    with recomputed:
        output = attend(*whole)
        stand_in = StandIn(output)
        source = recomputed.add(output, stand_in.make)
    return _to_tokens(layout, output, stand_in if source.saved else None)


def _to_tokens(layout: TokenLayout, output: Tensor, stand_in: StandIn | None) -> Tensor:
    tokens: Tensor = _ToTokens.apply(output, layout, stand_in)  # type: ignore[no-untyped-call]
    return tokens


def gather_keys(layout: TokenLayout, key: Tensor, value: Tensor) -> Tensor:
    """Return the keys and values of all tokens, concatenated along the features. Every rank must
    call this function."""
    return gather_tokens(layout, torch.cat([key, value], -1), 2)


def gather_tokens(layout: TokenLayout, tensor: Tensor, dim: int) -> Tensor:
    """Return the tokens of all ranks along `dim`, in the sequence's order, with a gradient. Every
    rank must call this function."""
    if layout.world.size == 1:
        return tensor
    rows = tensor.movedim(dim, 0).contiguous()
    gather = _GatherChunks if isinstance(layout.world, ChunkAxis) else GatherRows
    gathered: Tensor = gather.apply(rows, layout)  # type: ignore[no-untyped-call]
    return gathered.movedim(0, dim)


def _with_tokens(tensor: Tensor, tokens: int) -> tuple[int, ...]:
    return (*tensor.shape[:2], tokens, *tensor.shape[3:])


def _exchanged(
    world: World, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]]
) -> list[list[Tensor]]:
    several = len(parts[0])
    flat = _AllToAll.apply(  # type: ignore[no-untyped-call]
        world,
        [torch.Size(shape) for of_rank in shapes for shape in of_rank],
        several,
        *chain.from_iterable(parts),
    )
    return [list(flat[first : first + several]) for first in range(0, len(flat), several)]


class _AllToAll(torch.autograd.Function):
    """Sends several tensors to each rank in one collective. The backward sends the gradients
    back."""

    @staticmethod
    def forward(
        ctx: Any, world: World, shapes: list[torch.Size], several: int, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.world, ctx.several, ctx.shapes = world, several, [part.shape for part in parts]
        return _all_to_all(world, shapes, several, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        back = _AllToAll.apply(ctx.world, ctx.shapes, ctx.several, *gradients)  # type: ignore[no-untyped-call]
        return None, None, None, *back


class _ToTokens(torch.autograd.Function):
    """Sends each rank the attention output of the receiver's tokens in this rank's heads. The
    backward sends back the gradients, and the sums that the `StandIn` needs."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, layout: TokenLayout, stand_in: StandIn | None) -> Tensor:
        assert isinstance(layout.world, World), "chunks of a process exchange keys"
        ctx.layout, ctx.stand_in = layout, stand_in
        ordered = output.index_select(2, layout.gathered_places)
        shapes = [_with_tokens(output, layout.local)] * layout.world.size
        parts = torch.split(ordered, layout.counts, 2)
        received = _all_to_all(layout.world, shapes, 1, parts)
        # in the memory order that models use, so that they keep this tensor without a copy
        own = torch.cat([part.transpose(1, 2) for part in received], 2)
        if stand_in is not None:
            ctx.save_for_backward(own)
        return own.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        layout, stand_in, (gradient,) = ctx.layout, ctx.stand_in, gradients
        sent = [gradient]
        if stand_in is not None:
            (own,) = ctx.saved_tensors
            sent.append(sums_of(own.transpose(1, 2), gradient))
        pieces = [each.chunk(layout.world.size, 1) for each in sent]
        shapes = [
            torch.Size(_with_tokens(each[0], count)) for count in layout.counts for each in pieces
        ]
        parts = list(chain.from_iterable(zip(*pieces, strict=True)))
        received = _all_to_all(layout.world, shapes, len(sent), parts)
        whole, *sums = (
            torch.cat(received[first :: len(sent)], 2).index_select(2, layout.true_order)
            for first in range(len(sent))
        )
        if stand_in is not None:
            stand_in.receive(whole, *sums)
        return whole, None, None


def _all_to_all(
    world: World, shapes: Sequence[Sequence[int]], several: int, parts: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    given = torch.cat([part.reshape(-1) for part in parts])
    sizes = [math.prod(shape) for shape in shapes]
    received = world.all_to_all(
        given, _sums(sizes, several), _sums([part.numel() for part in parts], several)
    )
    pieces = zip(torch.split(received, sizes), shapes, strict=True)
    return tuple(piece.view(*shape) for piece, shape in pieces)


def _sums(sizes: Sequence[int], several: int) -> list[int]:
    ends = list(accumulate(sizes, initial=0))[::several]
    return [stop - start for start, stop in pairwise(ends)]


class GatherRows(torch.autograd.Function):
    """Gathers the rows (one per token) of all ranks, in the sequence's order. The backward sums a
    row's gradients in rank order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layout: TokenLayout) -> Tensor:
        ctx.layout = layout
        world, counts = layout.world, layout.counts
        assert isinstance(world, World)
        if len({*counts}) == 1:
            return world.gather_rows(rows, counts).index_select(0, layout.true_order)
        gathered = rows.new_empty(layout.tokens, *rows.shape[1:])
        # torch's all-gather of uneven parts, which Gloo lacks
        parts = torch.split(gathered, counts)
        parts[world.rank].copy_(rows)
        for each in [
            dist.broadcast(part, group=world.group, group_src=source, async_op=True)
            for source, part in enumerate(parts)
        ]:
            each.wait()
        return gathered.index_select(0, layout.true_order)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        world, counts = ctx.layout.world, ctx.layout.counts
        gradient = gradients[0].index_select(0, ctx.layout.gathered_places)
        own = ctx.layout.local
        received = world.all_to_all(gradient, [own] * world.size, counts)
        first, second, *others = torch.split(received, own)
        total = first + second
        for part in others:
            total += part
        return total, None


class _GatherChunks(torch.autograd.Function):
    """Gathers the rows (one per token) of all chunks, in the sequence's order. The backward sums a
    row's gradients in a fixed binary tree over the chunks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layout: TokenLayout) -> Tensor:
        ctx.layout = layout
        assert isinstance(layout.world, ChunkAxis)
        return layout.world.gather_rows(rows, layout.counts, layout.true_order).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        layout = ctx.layout
        order = layout.gathered_places
        return layout.world.sum_rows(gradients[0], layout.counts, order), None
