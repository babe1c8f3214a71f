"""Finds balance losses in an autograd graph: products of the experts' load and of mean
probabilities. The load requires no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lockstep.base import torch_private

MOST_NODES, MOST_STEPS = 500, 100
"""Largest numbers of nodes of the autograd graph to search, from the loss and from a product."""
PRODUCTS = ("MulBackward0", "DotBackward0")
MEANS = ("MeanBackward1", "SumBackward1")
RESHAPED = (
    *("ViewBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "ExpandBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "TransposeBackward0"),
    *("SelectBackward0", "ToCopyBackward0", "CloneBackward0", "AliasBackward0"),
)
SUMS = (
    *("AddBackward0", "SubBackward0", "NegBackward0", "DivBackward0", "StackBackward0"),
    *("CatBackward0", "SumBackward0", "MeanBackward0", "_DDPSinkBackward"),
)
_JOINED = ("AddBackward0", "StackBackward0", "CatBackward0")
_AVERAGING = (*RESHAPED, *MEANS, *_JOINED, "MulBackward0", "DivBackward0")
PROBABILITIES = ("SoftmaxBackward0", "SigmoidBackward0")


def loads_of_balance(root: Tensor) -> list[list[float]]:
    """Return the experts' loads in each balance loss that is part of the loss `root`."""
    return [
        load.detach().double().reshape(-1, load.shape[-1]).sum(0).tolist()
        for node in _terms(root.grad_fn)
        for load in _loads(node)
    ]


def _terms(root: Any) -> Iterator[Any]:
    waiting, seen = [root], set[Any]()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        if name in PRODUCTS:
            yield node
        if name in (*PRODUCTS, *SUMS, *MEANS, *RESHAPED):
            waiting += [each for each, _ in node.next_functions]


def _loads(product: Any) -> list[Tensor]:
    inputs = [each for each, _ in product.next_functions if each is not None]
    if not _is_mean_of_probabilities(inputs[0]):
        return []
    kept = torch_private.saved_factors(product)
    return [each for each in kept if each.dim() and each.shape[-1] > 1 and not each.requires_grad]


def _is_mean_of_probabilities(node: Any, *, is_mean: bool = False, steps: int = 0) -> bool:
    name = type(node).__name__
    if name in PROBABILITIES:
        return is_mean
    inputs = [each for each, _ in node.next_functions if each is not None]
    if name not in _AVERAGING or steps == MOST_STEPS or (len(inputs) > 1 and name not in _JOINED):
        return False
    return all(
        _is_mean_of_probabilities(each, is_mean=is_mean or name in MEANS, steps=steps + 1)
        for each in inputs
    )
