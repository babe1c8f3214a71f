"""The backward of a dummy microbatch. A rank without a microbatch computes a dummy microbatch,
because other ranks wait in collectives of the backward. Autograd runs a collective only if an
earlier leaf of the graph requires a gradient. A leaf need not be a parameter: with frozen
embeddings, PEFT makes the embeddings' output require a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def dummy_backward(
    total: Tensor, grad_output: Tensor, parameters: Sequence[Tensor], *, own_parameters_only: bool
) -> Sequence[Tensor | None]:
    """Return the gradients of the parameters and, unless `own_parameters_only`, of the graph's
    other leaves. Does not change any `.grad`."""
    leaves = parameters if own_parameters_only else _leaves_of(total, parameters)
    return torch.autograd.grad(total, leaves, grad_output, allow_unused=True)


def _leaves_of(total: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaf tensors of `total`'s graph, parameters first."""
    known = set(map(id, parameters))
    leaves = list(parameters)
    waiting: list[Any] = [] if total.grad_fn is None else [total.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name().endswith("AccumulateGrad") and id(leaf := node.variable) not in known:
            known.add(id(leaf))
            leaves.append(leaf)
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting += following
    return leaves
