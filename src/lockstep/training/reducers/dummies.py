"""The leaves of a dummy's backward.

A backward may have collectives (experts, SyncBatchNorm), in which a dummy must take part. They run
wherever a leaf needs a gradient. Some leaves are no parameters: with frozen embeddings, PEFT makes
the embeddings' output require a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def leaves_of(total: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters, and then the other leaves of the graph of `total`."""
    known = set(map(id, parameters))
    found = list(parameters)
    waiting: list[Any] = [] if total.grad_fn is None else [total.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name().endswith("AccumulateGrad") and id(leaf := node.variable) not in known:
            known.add(id(leaf))
            found.append(leaf)
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting += following
    return found
