"""The arithmetic of routers' loads and balance losses: functions of tensors.

A load is a row of integers for one layer: for each of its E experts, the number of tokens that
chose it; then the number of tokens, the number of choices out of range (also of tokens that do not
count), and the number of tokens whose logits are not finite. Sums of integers are exact in any
order, so the loads of microbatches and ranks are summed as they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

MORE = 3
"""Number of columns of a load after the experts' columns: number of tokens, choices out of range,
tokens with logits that are not finite."""


def load_of(index: Tensor, is_finite: Tensor, counted: Tensor | None, experts: int) -> Tensor:
    """Return the load (see the module) of some tokens in one layer: integers of shape (experts +
    MORE,). `index`: (tokens, k), the chosen experts. `is_finite`: (tokens,), True for tokens with
    finite logits. `counted`: (tokens,), True for tokens that count (no padding); None: all."""
    return loads_of_samples(index, is_finite, counted, experts, samples=1)[0]


def loads_of_samples(
    index: Tensor, is_finite: Tensor, counted: Tensor | None, experts: int, *, samples: int
) -> Tensor:
    """Return the load of each sample in one layer, (samples, experts + MORE). The tokens of a
    sample are consecutive. The arguments are as in `load_of`."""
    counts = (
        torch.ones(len(index), dtype=torch.int64, device=index.device)
        if counted is None
        else counted.to(torch.int64)
    )
    is_valid = (index >= 0) & (index < experts)
    column = torch.where(is_valid, index, experts + 1).long()
    loads = torch.zeros((samples, experts + MORE), dtype=torch.int64, device=index.device)
    of_each = counts.view(samples, -1)
    # a choice out of range is an error even if its token does not count
    safe_index = torch.where(is_valid, counts[:, None], 1)
    loads.scatter_add_(1, column.view(samples, -1), safe_index.view(samples, -1))
    loads[:, experts] = of_each.sum(1)
    loads[:, experts + 2] = ((~is_finite).to(torch.int64) * counts).view(samples, -1).sum(1)
    return loads


def chosen_per_token(load: Tensor) -> Tensor:
    """Return f: for each expert, the fraction of the tokens that chose it, in float64. The sum over
    experts is the number of experts that a token chooses. Without tokens: 0. `load`: (..., experts
    + MORE)."""
    tokens = load[..., -MORE, None].clamp(min=1)
    return load[..., :-MORE].double() / tokens.double()


def widened(logits: Tensor) -> Tensor:
    """Return the logits in float32 at least."""
    return logits if logits.dtype is torch.float64 else logits.float()


def probabilities(logits: Tensor, scores: Literal["softmax", "sigmoid"]) -> Tensor:
    """Return a router's probabilities (tokens, experts) for its logits, in float32 at least. With
    "sigmoid", each token's scores are divided by their sum."""
    wide = widened(logits)
    if scores == "softmax":
        return wide.softmax(-1)
    given = wide.sigmoid()
    return given / given.sum(-1, keepdim=True)


def summed_probabilities(given: Tensor, counted: Tensor | None, *, samples: int) -> Tensor:
    """Return the sum of a router's probabilities over the tokens of each sample, (samples,
    experts). `given`: the probabilities (tokens, experts). `counted`: True for tokens that count;
    None: all."""
    if counted is not None:
        given = given * counted[:, None]
    return given.view(samples, -1, given.shape[-1]).sum(1)


def balance_loss(chosen: Tensor, summed: Tensor) -> Tensor:
    """Return one layer's balance loss as a sum over tokens: E Σ f Σ p. Divided by the number of
    tokens, it is E Σ f P, with P the mean of p over tokens. E is the number of experts; the first
    sum is over experts, the second over tokens.

    `chosen`: f, for each expert the fraction of the tokens that chose it. `summed`: for each
    expert, its router probability p summed over tokens. Both have the shape (samples, experts), or
    (experts,)."""
    return chosen.shape[-1] * (chosen.to(summed.dtype) * summed).sum()


def averaged_over_layers(loads: Sequence[Tensor]) -> Tensor:
    """Return the sum of the layers' loads. If all layers have the same tokens, f (see
    `chosen_per_token`) of this sum is the mean of the layers' f."""
    return torch.stack(list(loads)).sum(0)


def z_loss(logits: Tensor, counted: Tensor | None) -> Tensor:
    """Return a router's z-loss: the sum over tokens of logsumexp(logits)**2. `counted`: True for
    tokens that count; None: all."""
    each = widened(logits).logsumexp(-1).square()
    return (each if counted is None else each * counted).sum()


def bias_step(load: Tensor) -> Tensor:
    """Return, for each expert, the direction in which the router's bias changes: 1 if the expert
    has fewer tokens than the mean, -1 if it has more, else 0. Integer arithmetic makes it exact."""
    counts = load[:-MORE]
    return (counts.sum() - counts * len(counts)).sign()


def relative_load(load: Tensor) -> Tensor:
    """Return, for each expert, the number of its tokens divided by the mean over the layer's
    experts; 0 without tokens. If the layer is balanced, all are 1."""
    counts = load[..., :-MORE].double()
    return counts / counts.mean(-1, keepdim=True).clamp(min=1e-300)
