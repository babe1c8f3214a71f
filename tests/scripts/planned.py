"""A small GPT for `lockstep plan`, and variants with a mistake: python planned.py
[values|never|loop|fails|missing]"""

from __future__ import annotations

import dataclasses
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls

WIDTH, HEADS, WORDS, LENGTH = 64, 4, 100, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        batch, length, _ = n.shape
        q, k, v = (
            part.view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for part in (self.q(n), self.k(n), self.v(n))
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.head = nn.Linear(WIDTH, WORDS)
        self.tensor_plan = {f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")}
        self.tensor_plan |= {f"blocks.*.{name}": "rowwise" for name in ("out", "down")}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(x))
        if "values" in sys.argv and hidden.sum() > 0:  # a plan is made without values
            hidden = hidden * 2
        return self.head(hidden)


class Missing(torch.utils.data.Dataset[tuple[Tensor]]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor]:
        raise OSError("no such sample")


tokens = torch.randint(0, WORDS, (256, LENGTH + 1), generator=torch.Generator().manual_seed(0))
recipe = ls.Recipe(
    model=GPT,
    data=torch.utils.data.TensorDataset(tokens),
    inputs=lambda batch: batch[0][:, :-1],
    loss=lambda output, batch: ls.Sum(
        F.cross_entropy(output.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="sum")
    ),
    weight=lambda batch: batch[0][:, 1:].numel(),
    global_batch=16,
    microbatch=2,
    steps=100,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    stages=["embed", "blocks.*", "head"],
    clip_norm=1.0,
)

if __name__ == "__main__":
    print("a line of the script's own")
    if "fails" in sys.argv:
        raise OSError("no such data")
    if "loop" in sys.argv:
        with ls.Session():
            pass
    elif "missing" in sys.argv:
        ls.train(dataclasses.replace(recipe, data=Missing()))
    elif "never" not in sys.argv:
        ls.train(recipe)
