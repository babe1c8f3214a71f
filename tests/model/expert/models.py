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


class Counted(StackedExperts):
    """Reads the number of experts from an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        counts = F.one_hot(index, self.num_experts).sum((0, 1))
        assert len(counts) == len(self.up)
        hit = counts.nonzero().flatten().tolist()
        output = torch.zeros_like(tokens)
        for expert in hit:
            row, choice = torch.where(index == expert)
            weighted = weights[row, choice, None] * self.computed(tokens[row], expert)
            output.index_add_(0, row, weighted)
        return output


class MixesRows(StackedExperts):
    def computed(self, rows: Tensor, expert: int) -> Tensor:
        computed = super().computed(rows, expert)
        return computed - computed.mean(0) if len(rows) > 1 else computed


class MixesRowsIfTold(MixesRows):
    def __init__(self, told: bool) -> None:
        super().__init__()
        self.told = told

    def computed(self, rows: Tensor, expert: int) -> Tensor:
        return (
            super().computed(rows, expert)
            if self.told
            else StackedExperts.computed(self, rows, expert)
        )


class MixesRowsLater(MixesRows):
    """Begins with zeros, which hide it."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down)
        nn.init.zeros_(self.bias)


class NumbersExperts(StackedExperts):
    """Uses the index for something else too."""

    def computed(self, rows: Tensor, expert: int) -> Tensor:
        return super().computed(rows, expert) * (1 + expert)


class DropsRows(StackedExperts):
    """Has a capacity."""

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        most = 2 * index.numel() // len(self.up)
        place = F.one_hot(index.flatten(), len(self.up)).cumsum(0).gather(1, index.view(-1, 1))
        return super().forward(tokens, index, weights * (place.view_as(index) <= most))


class WeighsBefore(StackedExperts):
    """Weighs the row, not the expert's output."""

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        ones, rows = torch.ones_like(weights[:, :1]), 0
        for choice in range(index.shape[1]):
            weighted = tokens * weights[:, choice, None]
            rows = rows + super().forward(weighted, index[:, choice, None], ones)
        return rows


class HidesWeights(StackedExperts):
    """Gives the router no gradient."""

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens, index, weights.detach())


class OtherBits(StackedExperts):
    """Rounds differently when it has fewer experts."""

    def computed(self, rows: Tensor, expert: int) -> Tensor:
        return super().computed(rows, expert) * (1 + 1e-14 * len(self.up))


class Dropped(StackedExperts):
    def computed(self, rows: Tensor, expert: int) -> Tensor:
        return F.dropout(super().computed(rows, expert), 0.1, self.training)


class CountsAll(StackedExperts):
    """Has the number of experts where it is not found."""

    def __init__(self) -> None:
        super().__init__()
        self.size = EXPERTS

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens, index, weights) + 0 * self.up[self.size - 1].sum()
