from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lockstep.base.errors import LossError, RecipeError
from lockstep.base.nested import map_tensors
from lockstep.base.torch_private import tree_leaves
from lockstep.model.chunked_logits import hidden_states, with_hidden
from lockstep.model.context.documents import Documents
from lockstep.model.context.label_shift import total_of, windows
from lockstep.model.trial import SINGLE, epsilon, tolerance

MOST_TOKENS = 32
Call = Callable[[Any, Documents], Any]
Part = Callable[[Any, int, int], tuple[Any, Any]]


@torch.no_grad()
def check_model(call: Call, arguments: Any, documents: Documents) -> Any:
    """Compute a row of two documents, made of a batch's first tokens. The second document's output
    must not depend on the first document. Every rank must call this function."""
    half = tried_tokens(documents) // 2
    if not half:
        return None
    device = documents.ids.device
    two = Documents.of(torch.arange(2, device=device).repeat_interleave(half)[None], device)
    one = Documents.of(two.ids[:, :half], device)
    packed = _cut(arguments, documents, slice(0, 2 * half))

    def changed(tensor: Tensor) -> Tensor:
        if tensor.shape[:2] != (1, 2 * half):
            return tensor
        second = tensor[:, half:]
        return torch.cat([second.flip(1), second], 1)

    of_alone = _cut(arguments, documents, slice(half, 2 * half))
    outputs = [call(packed, two), call(map_tensors(packed, changed), two), call(of_alone, one)]
    if outputs[0] is None:
        return None
    second, moved = (_rows(each, 2 * half)[:, half:] for each in outputs[:2])
    alone = _rows(outputs[2], half)
    eps, allowed = epsilon(second), tolerance(second)
    # the same operations on other numbers: rounding hardly differs
    noise = 64 * eps if eps <= SINGLE else eps
    if (error := _distance(moved, second)) > noise:
        raise RecipeError(
            "a token of one document changes the model's output for the next document in its row,"
            f" by {error:.1g} of its size, where rounding explains {noise:.1g}: tokens meet"
            " outside of the attention that Recipe.sequence keeps to documents; call"
            " F.scaled_dot_product_attention(query, key, value, is_causal=True) without a mask; a"
            " convolution, a mean over tokens, BatchNorm or a state along the row cannot be kept to"
            " documents: leave Recipe.sequence out, and give each document as a sample"
        )
    if (error := _distance(alone, second)) > allowed:
        raise RecipeError(
            "the model's output for a document depends on its place in the row, by"
            f" {error:.1g} of its size, where rounding explains {allowed:.1g}: its positions do not"
            " restart; let the forward take them as an argument, and name it:"
            " ls.Sequence(documents=..., positions='position_ids')"
        )
    return outputs[0]


def tried_tokens(documents: Documents) -> int:
    return 2 * min(documents.tokens // 2, MOST_TOKENS)


def _cut(arguments: Any, documents: Documents, tokens: slice) -> Any:
    samples = len(documents.ids)

    def cut(tensor: Tensor) -> Tensor:
        if tensor.shape[:2] == (samples, documents.tokens):
            return tensor[:1, tokens]
        return tensor[:1] if tensor.shape[:1] == (samples,) else tensor

    return map_tensors(arguments, cut)


def _rows(output: Any, tokens: int) -> Tensor:
    for leaf in tree_leaves(output):
        if (
            isinstance(leaf, Tensor)
            and leaf.is_floating_point()
            and leaf.dim() > 1
            and leaf.shape[:2] == (1, tokens)
        ):
            return hidden_states(leaf)
    raise RecipeError(
        f"the model's output has no tensor of shape (samples, tokens, ...) for {tokens} tokens;"
        " with documents it must return one output per token; leave Recipe.sequence out for a model"
        " with one output per sample"
    )


def _distance(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def check_labels(
    loss: Callable[[Any, Any], Any], part: Part, most: int, batch: Any, documents: Documents
) -> bool:
    """Raise `LossError` if the loss compares the last token of a document with the first token of
    the next document. Returns False if the batch does not show the comparison."""
    lasts = documents.lasts()
    if not lasts.any():
        return False
    others = _with_other_firsts(batch, documents)
    size = most, lasts.device
    read, reads_first = torch.zeros_like(lasts), False
    for row, start in product(range(len(lasts)), windows(documents.tokens, most)):
        places = row, slice(start, start + most)
        gradient = _gradient(loss, *part(batch, row, start), *size)
        is_read = gradient.flatten(1).abs().sum(1) > 0
        read[places] |= is_read
        wrong = is_read & lasts[places]
        if wrong.any() and not reads_first:
            changed = _gradient(loss, *part(others, row, start), *size)
            reads_first = not torch.equal(gradient[wrong], changed[wrong])
    if not read.any():
        return False
    wrong = read & lasts
    if not wrong.any():
        return True
    row, place = wrong.nonzero()[0].tolist()
    if reads_first:
        token, remedy = place + 1, "set the label of each document's first token to -100"
    elif _has_next_tokens(batch, documents, read):
        token, remedy = place, "set the label of each document's last token to -100"
    else:
        return True
    raise LossError(
        f"the loss reads a label at token {token} of row {row} with the output of token {place},"
        f" the last of its document; no token predicts the first of a document; {remedy}, in"
        " collate"
    )


def _gradient(
    loss: Callable[[Any, Any], Any], output: Any, batch: Any, tokens: int, device: torch.device
) -> Tensor:
    generator = torch.Generator().manual_seed(29)
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() and tensor.shape[:2] == (1, tokens)):
            return tensor.detach()
        return with_hidden(tensor.detach(), random)

    def random(tensor: Tensor) -> Tensor:
        leaf = torch.randn(tensor.shape, generator=generator).to(tensor).requires_grad_()
        leaves.append(leaf)
        return leaf

    with torch.enable_grad():
        total = total_of(loss(map_tensors(output, leaf), batch))
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    gradient = next((each for each in gradients if each is not None), None)
    return torch.zeros(tokens, 1, device=device) if gradient is None else gradient[0]


def _is_labels(leaf: Any, documents: Documents) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.shape == documents.ids.shape
        and not leaf.is_floating_point()
        and leaf.dtype != torch.bool
    )


def _with_other_firsts(batch: Any, documents: Documents) -> Any:
    firsts = documents.lasts().roll(1, 1)

    def changed(leaf: Tensor) -> Tensor:
        if not _is_labels(leaf, documents):
            return leaf
        other = leaf.roll(1, 1).clamp(min=0)
        other = torch.where(other == leaf, (leaf.max() - leaf).clamp(min=0), other)
        return torch.where(firsts & (leaf >= 0), other, leaf)

    return map_tensors(batch, changed)


def _has_next_tokens(batch: Any, documents: Documents, read: Tensor) -> bool:
    places = read[:, :-1]
    tensors = [leaf for leaf in tree_leaves(batch) if _is_labels(leaf, documents)]
    return any(
        bool((label[:, :-1] == text[:, 1:])[places].all())
        for text in tensors
        for label in tensors
        if label is not text
    )
