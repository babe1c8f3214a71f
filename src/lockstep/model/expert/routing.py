"""Computes, from the chosen experts, the pairs of a token and an expert that each rank computes.
Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """The pairs (token, expert) of this rank's tokens, in the order in which they are sent."""

    order: Tensor
    """The pairs, sorted by expert and then by token. Pair number `k * token + choice` is a token
    with one of its k experts."""
    counts: Tensor
    """Number of pairs of each expert: (E,)."""
    outside: Tensor
    """Number of pairs whose expert does not exist."""

    @classmethod
    def of(cls, index: Tensor, experts: int) -> Routing:
        """Return the routing of the chosen experts, `index` (S, k). No value is read by the
        host."""
        experts_in_order, order = index.reshape(-1).sort(stable=True)
        bounds = torch.arange(
            experts + 1, dtype=experts_in_order.dtype, device=experts_in_order.device
        )
        counts = torch.searchsorted(experts_in_order, bounds).diff()
        return cls(order, counts, len(order) - counts.sum())

    @classmethod
    def empty(cls, experts: int, device: torch.device) -> Routing:
        """Return the routing of a dummy microbatch, which sends no pair."""
        zeros = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        return cls(zeros[:0], zeros[:-1], zeros[-1])


def local_experts(counts: Tensor, rows: int) -> Tensor:
    """Return the local expert of each received row. `counts`: (ranks, local experts), the rows from
    each rank for each expert. `rows`: their sum."""
    ends = counts.flatten().cumsum(0)
    # not repeat_interleave, for which the host may wait
    places = torch.arange(rows, device=counts.device)
    return torch.searchsorted(ends, places, right=True) % counts.shape[1]
