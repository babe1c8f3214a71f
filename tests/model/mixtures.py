"""Small mixtures of experts for tests. At module level, so that workers can be told their names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 17, 12, 8, 4, 2


class Experts(nn.Module):
    """All experts of a layer, with stacked parameters."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in index.unique().tolist():
            row, choice = (index == expert).nonzero(as_tuple=True)
            computed = F.silu(tokens[row] @ self.up[expert]) @ self.down[expert]
            computed = computed * weights[row, choice, None]
            output = output.index_add(0, row, computed.to(output.dtype))
        return output


class MixtureBlock(nn.Module):
    """A layer of experts with its router, whose bias only chooses."""

    def __init__(self, dropout: float, chosen: int = CHOSEN) -> None:
        super().__init__()
        self.chosen = chosen
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        tokens = x.reshape(-1, WIDTH)
        logits = self.router(tokens)
        assert isinstance(self.bias, Tensor)
        index = (logits.softmax(-1) + self.bias).topk(self.chosen).indices
        weights = logits.softmax(-1).gather(1, index)
        return x + self.dropout(self.experts(tokens, index, weights)).view_as(x)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """(samples, tokens) words -> (samples, tokens, WORDS) logits. Float64."""

    def __init__(self, dropout: float = 0.0, blocks: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(MixtureBlock(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]
