"""Small GPTs, right ones and wrong ones, and their losses. At module level, for workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, HEADS, LONGEST = 50, 24, 6, 64


class Block(nn.Module):
    def __init__(
        self, extra: str, dropout: float, attention_dropout: float, heads: int, *, causal: bool
    ) -> None:
        super().__init__()
        self.heads = heads
        self.extra, self.causal, self.attention_dropout = extra, causal, attention_dropout
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        if extra == "convolution":
            self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        if extra == "batch norm":
            self.batch_norm = nn.BatchNorm1d(WIDTH)
        if extra == "multihead":
            self.multihead = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        query, key, value = (
            part.view(samples, tokens, self.heads, -1).transpose(1, 2) for part in parts
        )
        dropout = self.attention_dropout * self.training
        if self.extra == "own mask":
            mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        elif self.extra == "own attention":
            mask = torch.full((tokens, tokens), -torch.inf).triu(1)
            y = (query @ key.transpose(-1, -2) / 2 + mask).softmax(-1) @ value
        else:
            y = F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=self.causal
            )
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(x.shape)))
        if self.extra == "convolution":
            x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        if self.extra == "batch norm":
            x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        if self.extra == "mean":
            x = x - x.mean(1, keepdim=True)
        if self.extra == "multihead":
            x = x + self.multihead(x, x, x)[0]
        if self.extra == "experts":
            # as many slices as there are groups of tokens that choose it
            chosen = (x[..., 0] > 0).flatten().nonzero().flatten()
            for start in range(0, len(chosen), 3):
                rows = chosen[start : start + 3]
                x = x.flatten(0, 1).index_add(0, rows, x.flatten(0, 1)[rows].sin()).view(x.shape)
        if self.extra == "noise":
            x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(samples, tokens, 1, dtype=x.dtype)
        return x + self.dropout(self.down(F.gelu(self.up(self.second_norm(x)))))


class GPT(nn.Module):
    """nanoGPT's way (`arange`), or with positions that are a slice of a parameter or a buffer."""

    def __init__(
        self,
        positions: str = "arange",
        extra: str = "",
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        heads: int = HEADS,
        *,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.positions, self.extra = positions, extra
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.table = nn.Parameter(torch.randn(1, LONGEST, WIDTH) * 0.1)
        self.register_buffer("fixed", torch.randn(LONGEST, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(
            Block(extra, dropout, attention_dropout, heads, causal=causal) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        tokens = words.shape[1]
        x = self.words(words)
        if self.positions == "arange":
            x = x + self.places(torch.arange(0, tokens, dtype=torch.long, device=words.device))
        elif self.positions == "slice":
            x = x + self.table[..., :tokens, :]
        elif self.positions == "buffer":
            x = x + self.fixed[:tokens]
        elif self.positions == "cumsum":
            x = x + self.places(torch.ones_like(words).cumsum(1) - 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0] if self.extra == "class token" else x)  # type: ignore[no-any-return]


def text(samples: int, tokens: int, ignored: float = 0.2) -> dict[str, Tensor]:
    """A batch, of whose labels some are ignored."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (samples, tokens), generator=generator)
    gone = torch.rand(samples, tokens, generator=generator) < ignored
    return {"words": words, "labels": words.masked_fill(gone, -100)}


def shifting(output: Tensor, batch: Any) -> Tensor:
    """A loss that shifts its labels."""
    return F.cross_entropy(
        output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )


def shifted_before(output: Tensor, batch: Any) -> Tensor:
    """A loss whose labels are shifted by collate."""
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
