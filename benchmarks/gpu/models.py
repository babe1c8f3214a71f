"""The GPT that the checks train, its recipe, and hooks that plant faults."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from results import CPU
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        for each in (self.tokens, self.positions):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Head(nn.Module):
    def __init__(self, width: int, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(width), weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


class GPT(nn.Module):
    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        context: int,
        vocabulary: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, width, context)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.head = Head(width, self.embedding.tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class Tokens:
    """Random tokens, of which a few are frequent: the embedding's backward adds many rows to the
    same one."""

    def __init__(self, vocabulary: int, context: int, samples: int) -> None:
        draws = torch.rand(samples, context + 1, generator=torch.Generator().manual_seed(0))
        self.rows = (draws**4 * vocabulary).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self.rows[indices]


def cross_entropy(logits: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


SMALL = {"layers": 4, "width": 256, "heads": 4, "context": 256, "vocabulary": 1000}
TINY = {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 64}


def recipe(
    *,
    size: dict[str, int] = SMALL,
    dropout: float = 0.1,
    samples: int = 256,
    fused: bool = True,
    **changes: Any,
) -> ls.Recipe:
    size = TINY if CPU else size
    settings = {
        "steps": 8,
        "global_batch": 16,
        "microbatch": 4,
        "precision": "fp32",
        "clip_norm": 1.0,
        **changes,
    }
    return ls.Recipe(
        model=lambda: GPT(**size, dropout=dropout),
        data=Tokens(size["vocabulary"], size["context"], samples),
        inputs=lambda batch: batch[:, :-1],
        loss=cross_entropy,
        optimizer=lambda model: torch.optim.AdamW(
            model.parameters(), lr=1e-3, weight_decay=0.1, fused=fused
        ),
        blocks=["blocks.*"],
        stages=["embedding", "blocks.*", "head"],
        tensor={"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"},
        **settings,
    )


class Fault(ls.Hook):
    """Does something on one rank at one step."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def is_now(self, run: ls.Run) -> bool:
        return run.step == self.step and run.context.world.rank == self.rank


class KillOnce(Fault):
    """Kills the process after the step, the first time. The file `mark` then has the time."""

    def __init__(self, step: int, rank: int, mark: Path) -> None:
        super().__init__(step, rank)
        self.mark = mark

    def after_step(self, run: ls.Run) -> None:
        if self.is_now(run) and not self.mark.exists():
            self.mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


class Raise(Fault):
    def before_step(self, run: ls.Run) -> None:
        if self.is_now(run):
            raise ValueError("raised on purpose")


class Sleep(Fault):
    def before_step(self, run: ls.Run) -> None:
        if self.is_now(run):
            time.sleep(60)
