from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """The pairs (token, expert) of this rank's tokens, in the order of sending."""

    order: Tensor
    """The numbers of the pairs (token, expert), sorted by expert and then by token. The number of a
    pair is `k * token + choice`."""
    counts: Tensor
    outside: Tensor

    @classmethod
    def of(cls, index: Tensor, experts: int) -> Routing:
        """`index` has the k experts of each token. The host does not wait for the device."""
        experts_in_order, order = index.reshape(-1).sort(stable=True)
        bounds = torch.arange(
            experts + 1, dtype=experts_in_order.dtype, device=experts_in_order.device
        )
        counts = torch.searchsorted(experts_in_order, bounds).diff()
        return cls(order, counts, len(order) - counts.sum())

    @classmethod
    def empty(cls, experts: int, device: torch.device) -> Routing:
        zeros = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        return cls(zeros[:0], zeros[:-1], zeros[-1])


def local_experts(counts: Tensor, rows: int) -> Tensor:
    """Return, for each received row, the index of its expert among this rank's experts."""
    ends = counts.flatten().cumsum(0)
    # not repeat_interleave, for which the host may wait
    places = torch.arange(rows, device=counts.device)
    return torch.searchsorted(ends, places, right=True) % counts.shape[1]
