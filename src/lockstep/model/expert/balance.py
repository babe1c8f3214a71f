"""The arithmetic of routers' loads and balance losses. A load is a row of integers for one layer:
the number of tokens of each expert, the number of tokens, the number of choices out of range, and
the number of tokens with logits that are not finite. Sums of integers are exact in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

MORE = 3


def loads_of_samples(
    index: Tensor, is_finite: Tensor, counted: Tensor | None, experts: int, *, samples: int
) -> Tensor:
    """Return the load of each sample. `counted` is a mask that is False for padding tokens. If
    `counted` is None, all tokens count."""
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
    """Return, for each expert, the fraction of the tokens that chose the expert, in float64."""
    tokens = load[..., -MORE, None].clamp(min=1)
    return load[..., :-MORE].double() / tokens.double()


def widened(logits: Tensor) -> Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()


def probabilities(logits: Tensor, scores: Literal["softmax", "sigmoid"]) -> Tensor:
    """Return a router's probabilities (tokens, experts) in float32 at least. With "sigmoid", each
    token's scores are divided by their sum."""
    wide = widened(logits)
    if scores == "softmax":
        return wide.softmax(-1)
    given = wide.sigmoid()
    return given / given.sum(-1, keepdim=True)


def summed_probabilities(given: Tensor, counted: Tensor | None, *, samples: int) -> Tensor:
    if counted is not None:
        given = given * counted[:, None]
    return given.view(samples, -1, given.shape[-1]).sum(1)


def balance_loss(chosen: Tensor, summed: Tensor) -> Tensor:
    """Return one layer's balance loss as a sum over tokens, E Σ f Σ p. E is the number of experts,
    f is the fraction of the tokens that chose an expert, and p is the router probability of the
    expert, summed over tokens."""
    return chosen.shape[-1] * (chosen.to(summed.dtype) * summed).sum()


def averaged_over_layers(loads: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(loads)).sum(0)


def z_loss(logits: Tensor, counted: Tensor | None) -> Tensor:
    each = widened(logits).logsumexp(-1).square()
    return (each if counted is None else each * counted).sum()


def bias_step(load: Tensor) -> Tensor:
    """Return 1 for an expert with fewer tokens than the mean, and -1 for an expert with more
    tokens. The comparison with the mean is exact, because it uses integers."""
    counts = load[:-MORE]
    return (counts.sum() - counts * len(counts)).sign()


def relative_load(load: Tensor) -> Tensor:
    """Return each expert's number of tokens divided by the mean over the layer's experts."""
    counts = load[..., :-MORE].double()
    return counts / counts.mean(-1, keepdim=True).clamp(min=1e-300)
