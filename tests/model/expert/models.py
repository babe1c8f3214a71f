"""Small models with experts, right ones and wrong ones. At module level, for workers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HIDDEN, EXPERTS, CHOSEN = 6, 10, 8, 2


class StackedExperts(nn.Module):
    """Experts as a user writes them; reads their number from the parameter."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH))
        self.bias = nn.Parameter(torch.randn(experts, WIDTH))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            row, choice = (index == expert).nonzero(as_tuple=True)
            output = output.index_add(
                0, row, weights[row, choice, None] * self.computed(tokens[row], expert)
            )
        return output

    def computed(self, rows: Tensor, expert: int) -> Tensor:
        return F.silu(rows @ self.up[expert]) @ self.down[expert] + self.bias[expert]


class Mixture(nn.Module):
    """A router and its experts, with a residual stream around them."""

    def __init__(self, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = StackedExperts() if experts is None else experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, index = self.router(tokens).softmax(-1).topk(CHOSEN)
        return x + self.experts(F.layer_norm(tokens, (WIDTH,)), index, weights).view_as(x)


class ListedMixture(nn.Module):
    """Experts in a list of modules."""

    def __init__(self, name: str = "experts") -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(EXPERTS)
        )
        self.name = name
        setattr(self, name, experts)


class Heads(nn.Module):
    """A module of another kind, whose parameters are stacked too, called with three arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query + key + value
