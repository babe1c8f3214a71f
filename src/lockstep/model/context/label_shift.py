"""Computes a loss function on the tokens of one rank. A loss may shift its labels (`output[:,
:-1]`, `labels[:, 1:]`). The label of a chunk's last token may be on another rank. The loss gets
labels that are already shifted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.base.dtypes import dtype_name
from lockstep.base.errors import LossError
from lockstep.base.nested import map_tensors, tensors_in
from lockstep.model.chunked_logits import ChunkedLogits, hidden_states, with_hidden
from lockstep.model.context.exchange import TokenLayout
from lockstep.recipe.checks import not_a_scalar
from lockstep.recipe.recipe import Loss, Sum

LossFunction = Callable[[Any, Any], Any]
TOLERANCE = 1e-4
"""A relative tolerance for float32. Sums of the same losses in different orders differ by less than
this tolerance."""


def has_tokens(tensor: Tensor, dim: int, tokens: int) -> bool:
    return tensor.dim() > dim and tensor.shape[dim] == tokens


def map_tokens(value: Any, dim: int, tokens: int, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply `function` to each tensor that has the tokens along `dim`, and to the hidden states of
    chunked logits."""
    return map_tensors(
        value,
        lambda tensor: with_hidden(tensor, function) if has_tokens(tensor, dim, tokens) else tensor,
    )


def map_known(value: Any, known: Sequence[bool], function: Callable[[Tensor], Tensor]) -> Any:
    are_sequences = iter(known)
    return map_tensors(value, lambda tensor: function(tensor) if next(are_sequences) else tensor)


def windows(tokens: int, most: int) -> list[int]:
    """Return the index of the first token of each window of `most` tokens. Windows overlap by one
    token, so any two consecutive tokens are together in a window."""
    return [*range(0, tokens - most, max(1, most - 1)), tokens - most]


class BatchCut(NamedTuple):
    """The division of a batch's tokens among ranks, for calls of the loss function."""

    layout: TokenLayout
    dim: int
    known: Sequence[bool]
    """For each of the batch's tensors, True if the tensor has a dim of tokens."""


def parts_of(
    output: Any, batch: Any, cut: BatchCut, rank: int, shift: int
) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of a part of the output and a part of the batch. The losses of the pairs sum to
    the loss of the tokens of `rank`. `shift` is 1 if the loss compares a token's output with the
    next token's label, else 0."""
    layout, dim = cut.layout, cut.dim
    places = layout.places_of(rank)
    own_tokens, tokens = layout.counts[rank], layout.tokens
    select = partial(map_known, batch, cut.known)
    rows = partial(map_tokens, output, dim, own_tokens)
    if not shift:
        yield output, select(lambda tensor: tensor.index_select(dim, places))
        return
    following = (places + 1).clamp(max=tokens - 1)

    def shifted(start: int, stop: int) -> Any:
        labels = torch.cat([places[start : start + 1], following[start : stop - 1]])
        return select(lambda tensor: tensor.index_select(dim, labels))

    # the last token of the sequence has no label, and the loss itself drops the last row
    spans = [span for span in layout.spans_of(rank) if span]
    ends = [span.stop for span in spans]
    end = sum(map(len, spans[: ends.index(tokens) + 1])) if tokens in ends else 0
    if any(isinstance(each, ChunkedLogits) for each in tensors_in(output)):
        # copying rows of hidden states is cheap, but each call of the loss computes a gradient of
        # the head
        order = [*range(end, own_tokens), *(range(end) or [own_tokens - 1])]
        index = torch.tensor(order, device=places.device)
        labels = torch.cat([places[:1], following[index[:-1]]])
        yield (
            rows(partial(_selected, dim, index)),
            select(lambda tensor: tensor.index_select(dim, labels)),
        )
        return
    if end != own_tokens:
        # for the label of the last row: two rows, of which the loss drops one. As the first part,
        # its backward runs last: its zeros for all other rows then find the memory of the other
        # parts free
        last = own_tokens - 1
        labels = torch.cat([places[last:], following[last:]])
        yield (
            rows(lambda tensor: torch.cat([tensor.narrow(dim, last, 1)] * 2, dim)),
            select(lambda tensor: tensor.index_select(dim, labels)),
        )
    elif own_tokens == 1:  # it has no label, and only gives the loss a gradient
        yield output, shifted(0, 1)
    for start, stop in ((0, end), (end, own_tokens)):
        if stop - start > 1:
            yield rows(partial(_narrowed, dim, start, stop)), shifted(start, stop)


def loss_of_part(
    loss: LossFunction, output: Any, batch: Any, cut: BatchCut, rank: int, shift: int
) -> Any:
    first, *others = [
        checked_terms(loss(*part)) for part in parts_of(output, batch, cut, rank, shift)
    ]
    for other in others:
        first = _sum_of_losses(first, other)
    outputs = (hidden_states(each) for each in tensors_in(output))
    learned = next((each for each in outputs if each.requires_grad), None)
    if learned is None or not torch.is_grad_enabled():
        return first
    return _map_totals(first, partial(_with_zero_gradient, learned.narrow(0, 0, 0)))


def _with_zero_gradient(nothing: Tensor, total: Any) -> Any:
    """Give a gradient of zeros to a loss without a gradient. A loss has no gradient if no token has
    a label, but every rank must call the collectives of the backward."""
    is_tensor = isinstance(total, Tensor)
    if (is_tensor and (total.requires_grad or total.numel() != 1)) or total != 0:
        return total
    return total + nothing.sum()


def find_shift(loss: LossFunction, output: Any, batch: Any, cut: BatchCut) -> int | None:
    """Return 1 if the loss compares a token's output with the next token's label, else 0. Returns
    None if the batch does not show the shift. Raises `LossError` if the loss is not a sum over
    tokens, or if rounding hides the shift."""
    layout, dim = cut.layout, cut.dim
    tokens = layout.tokens
    generator = torch.Generator().manual_seed(17)

    def random(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        # in a shorter dtype, rounding would hide the shift
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(
            tensor.device, dtype
        )

    output = map_tokens(map_tensors(output, Tensor.detach), dim, tokens, random)
    said = ""
    sums: list[list[float]] = []
    with torch.no_grad():
        try:
            value = loss(output, batch)
        except (RuntimeError, ValueError, IndexError) as error:
            raise _of_a_part(str(error), layout, dim) from error
        checked_terms(value)
        if (dtype := _short_dtype(value)) is not None:
            raise LossError(
                f"the loss is summed in {dtype}; under {layout.cut_by} it is computed for parts of"
                " the tokens, and rounding hides whether these sum to the whole; sum in float32:"
                " output.float()"
            )
        whole = [*map(float, scalars_of(value))]
        for shift in (0, 1):
            try:
                sums.append(_totals_by_part(loss, output, batch, cut, shift))
            except (RuntimeError, ValueError, IndexError) as error:
                said = said or str(error)
                sums.append([math.nan] * len(whole))
    is_right = [_are_close(found, whole) for found in sums]
    if all(is_right):
        return None
    if said and not any(is_right):
        raise _of_a_part(said, layout, dim)
    if not any(is_right):
        found = [", ".join(f"{number:.6g}" for number in each) for each in (whole, *sums)]
        raise LossError(
            f"the loss is not a sum over tokens: of {tokens} tokens it is {found[0]}, and the"
            f" losses of their parts sum to {found[1]}, or {found[2]} if it shifts labels by one;"
            f" under {layout.cut_by} it is computed for parts of the tokens, and these are summed;"
            " return ls.Sum(total), the sum over the tokens with a label, and give Recipe.weight"
            " = batch -> their number, instead of a mean over tokens, a loss of the last token,"
            " or one of their mean; labels may be shifted by one token, no further; what depends on"
            " the place of a token belongs into the batch"
        )
    shift = is_right.index(True)
    _check_shared(loss, output, batch, cut, shift)
    return shift


def _of_a_part(said: str, layout: TokenLayout, dim: int) -> LossError:
    return LossError(
        f"the loss cannot be computed for a part of the tokens: {said}; under {layout.cut_by} it is"
        " called with the output of some tokens, and with their part of each tensor of the batch"
        f" that has all tokens in dim {dim}; give labels that are as long as the model's input,"
        " such as words = text[:, :-1] and labels = text[:, 1:] in collate; put other tensors as"
        " long as the sequence into the batch, with a dim for the samples"
    )


def _check_shared(loss: LossFunction, output: Any, batch: Any, cut: BatchCut, shift: int) -> None:
    """Raise `LossError` if the loss uses a tensor of the output that has no dim of tokens, such as
    an auxiliary loss. If ranks divide the tokens, each rank would add the auxiliary loss."""
    layout, dim = cut.layout, cut.dim
    shared: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        if has_tokens(tensor, dim, layout.tokens) or not tensor.is_floating_point():
            return tensor
        shared.append(tensor.clone().requires_grad_())
        return shared[-1]

    def slopes(value: Any) -> list[Tensor]:
        total = total_of(value)
        if not total.requires_grad:
            return [torch.zeros_like(each) for each in shared]
        gradients = torch.autograd.grad(total, shared, allow_unused=True)
        pairs = zip(gradients, shared, strict=True)
        return [torch.zeros_like(each) if slope is None else slope for slope, each in pairs]

    output = map_tensors(output, leaf)
    if not shared:
        return
    with torch.enable_grad():
        whole = slopes(loss(output, batch))
        sums = [torch.zeros_like(each) for each in shared]
        for rank in range(layout.world.size):
            part = _part(output, layout, rank, dim)
            gradients = slopes(loss_of_part(loss, part, batch, cut, rank, shift))
            sums = [one + other for one, other in zip(sums, gradients, strict=True)]
    for tensor, slope, summed in zip(shared, whole, sums, strict=True):
        if not (summed - slope).norm() <= 10 * TOLERANCE * slope.norm():
            raise LossError(
                f"the loss adds a term of a tensor of shape {tuple(tensor.shape)} in the model's"
                f" output, which is not for each token; under {layout.cut_by} it would be added for"
                f" each part of the tokens; leave the term out, or {layout.otherwise}"
            )


def checked_terms(value: Any) -> Any:
    """Return the result of a loss function. Raises `LossError` if a term is not a number."""
    terms = value.items() if isinstance(value, dict) else [("loss", value)]
    for name, term in terms:
        total = term.total if isinstance(term, Loss | Sum) else term
        if not isinstance(total, Tensor | Real):
            raise not_a_scalar(name, total)
    return value


def total_of(value: Any) -> Any:
    if isinstance(value, dict):
        return sum(map(total_of, value.values()))
    return value.total if isinstance(value, Loss | Sum) else value


def scalars_of(value: Any) -> Iterator[Any]:
    """Yield the total of each term in the result of a loss function, and the weight of an
    `ls.Loss`."""
    if isinstance(value, dict):
        for name in sorted(value, key=str):
            yield from scalars_of(value[name])
    elif isinstance(value, Loss):
        yield from (value.total, value.weight)
    else:
        yield value.total if isinstance(value, Sum) else value


def _map_totals(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _map_totals(term, function) for name, term in value.items()}
    if isinstance(value, Loss):
        return Loss(function(value.total), value.weight)
    return Sum(function(value.total)) if isinstance(value, Sum) else function(value)


def _part(output: Any, layout: TokenLayout, rank: int, dim: int) -> Any:
    places = layout.places_of(rank)
    return map_tokens(output, dim, layout.tokens, partial(_selected, dim, places))


def _totals_by_part(
    loss: LossFunction, output: Any, batch: Any, cut: BatchCut, shift: int
) -> list[float]:
    total: list[float] = []
    for rank in range(cut.layout.world.size):
        part = _part(output, cut.layout, rank, cut.dim)
        totals = [*map(float, scalars_of(loss_of_part(loss, part, batch, cut, rank, shift)))]
        total = [a + b for a, b in zip(total, totals, strict=True)] if total else totals
    return total


def _narrowed(dim: int, start: int, stop: int, tensor: Tensor) -> Tensor:
    return tensor.narrow(dim, start, stop - start)


def _selected(dim: int, places: Tensor, tensor: Tensor) -> Tensor:
    return tensor.index_select(dim, places)


def _are_close(found: list[float], whole: list[float]) -> bool:
    return all(
        abs(one - other) <= TOLERANCE * abs(other) for one, other in zip(found, whole, strict=True)
    )


def _sum_of_losses(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {name: _sum_of_losses(term, other[name]) for name, term in one.items()}
    if isinstance(one, Sum):
        return Sum(one.total + other.total)
    if isinstance(one, Loss):
        return Loss(one.total + other.total, one.weight + other.weight)
    return one + other


def _short_dtype(value: Any) -> str | None:
    if isinstance(value, dict):
        return next(filter(None, map(_short_dtype, value.values())), None)
    total = value.total if isinstance(value, Sum | Loss) else value
    is_short = isinstance(total, Tensor) and total.dtype in (torch.bfloat16, torch.float16)
    return dtype_name(total.dtype) if is_short else None
