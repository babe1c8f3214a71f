"""Models for the tests of the `tensor` axis, small enough to compute in milliseconds. At module
level, so that workers find them."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.comm.mesh import Mesh
from lockstep.comm.world import join
from lockstep.plan import Plan

WIDTH, HEADS, WORDS = 16, 4, 24


class Attention(nn.Module):
    """It never names the number of heads, so a rank may have fewer. A norm over each head, a
    parameter that is whole on all ranks."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.query, self.key, self.value, self.projection = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.norm = nn.LayerNorm(WIDTH // HEADS)
        self.rest = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            self.norm(query), self.norm(key), value, is_causal=True, dropout_p=drop
        )
        return self.rest(self.projection(mixed.transpose(1, 2).reshape(batch, length, -1)))


class FullCount(Attention):
    """As people write it: it names the number of heads."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class HalfDepth(Attention):
    """With all heads on every rank, each of a part of its depth: no error, another result."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, -1))


class Fused(nn.Module):
    """Query, key and value from one layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            self.c_attn(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = attention(dropout)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.perceptron(self.norms[1](x))


class Model(nn.Module):
    """(batch, length) words -> (batch, length, WORDS) logits. The output layer is tied to the
    embedding."""

    def __init__(
        self,
        attention: type[nn.Module] = Attention,
        dropout: float = 0.0,
        *,
        functional_tie: bool = False,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(8, WIDTH))
        self.blocks = nn.ModuleList(Block(attention, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = None if functional_tie else nn.Linear(WIDTH, WORDS, bias=False)
        if self.head is not None:
            self.head.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.linear(x, self.words.weight) if self.head is None else self.head(x)


LAYERS = {
    "*.query": "colwise",
    "*.key": "colwise",
    "*.value": "colwise",
    "*.projection": "rowwise",
    "*.perceptron.0": "colwise",
    "*.perceptron.3": "rowwise",
}
TIED = {**LAYERS, "words": "embedding", "head": "vocabulary"}
SEQUENCE = {
    **{name: style.replace("rowwise", "rowwise_sequence") for name, style in LAYERS.items()},
    "*.norms.*": "sequence",
}
SEQUENCE |= {"norm": "sequence", "words": "embedding_sequence", "head": "vocabulary"}
GATHERED = {
    "*.c_attn": "colwise_gathered",
    "*.projection": "rowwise_split",
    "*.perceptron.0": "colwise",
    "*.perceptron.3": "rowwise",
}


def mesh_of(**sizes: int) -> Mesh:
    numbers = {name: int(os.environ[name.upper()]) for name in ("rank", "local_rank")}
    world = join(
        size=int(os.environ["WORLD_SIZE"]),
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        **numbers,
    )
    return Mesh.of(world, Plan(**{"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1, **sizes}))
