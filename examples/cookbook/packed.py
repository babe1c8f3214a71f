"""A language model on packed documents: two streams mixed, tokenized as they are read, and packed
into rows; the loss of the documents one by one.

lockstep run --nproc 2 --plan context=2,workers=1 examples/cookbook/packed.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls

LENGTH, SHARDS = 64, 8  # tokens of a row; shards of each stream
PROSE, CODE = "the quick brown fox jumps over a lazy dog", "x = ( 1 + 2 ) * y"
WORDS = {"prose": PROSE.split(), "code": CODE.split()}


def text(kind: str, number: int) -> str:
    """A document of 1 to 60 words, which stands for one of a file."""
    draw = random.Random(f"{kind} {number}")
    words = WORDS[kind]
    first, count = draw.randrange(len(words)), draw.randint(1, 60)
    return " ".join(words[(first + place) % len(words)] for place in range(count))


VOCABULARY = {word: number for number, word in enumerate(["", *WORDS["prose"], *WORDS["code"]])}


def tokenize(document: str) -> list[int]:
    return [VOCABULARY[word] for word in document.split()]


def reader(kind: str) -> Callable[[int, int, int], Iterator[list[int]]]:
    def read(shard: int, epoch: int, start: int) -> Iterator[list[int]]:
        for number in range(start, 50):
            yield tokenize(text(kind, number * SHARDS + shard))

    return read


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.heads, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.norms[0](x)).unflatten(2, (6, -1)).transpose(1, 2).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        grown: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + grown


class GPT(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, len(VOCABULARY))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def loss(logits: Tensor, batch: dict[str, Tensor]) -> ls.Sum:
    words = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )
    return ls.Sum(words)


streams = {kind: ls.Stream(reader(kind), shards=SHARDS, window=8) for kind in WORDS}
held_out = [tokenize(text(kind, number)) for kind in WORDS for number in range(1000, 1020)]
recipe = ls.Recipe(
    model=GPT,
    # three documents of prose for one of code
    data=ls.pack(ls.Stream.mix(streams, weights={"prose": 3, "code": 1}), LENGTH),
    inputs=lambda batch: {name: batch[name] for name in ("input_ids", "position_ids")},
    # tokens attend to those before them in their own document
    sequence=ls.Sequence(documents=lambda batch: batch["document_ids"], chunks=4),
    loss=loss,
    weight=lambda batch: (batch["labels"] != -100).sum(),  # the tokens that are predicted
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    global_batch=16,
    microbatch=4,
    steps=10,
    clip_norm=1.0,
    evaluation=ls.Evaluation(data=ls.pack(held_out, LENGTH)),
)


def train(**options: Any) -> str:
    return ls.train(recipe, **options).fingerprint


if __name__ == "__main__":
    train()
