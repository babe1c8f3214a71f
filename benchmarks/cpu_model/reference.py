"""Small models whose operations and steps are measured, to know the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.plan import Plan, Size
from lockstep.recipe.recipe import Recipe

Scale = Literal["tiny", "middle", "large"]
"""Tiny: Python alone takes time. Middle: operations push Python out of the caches. Large:
operations take the time."""
TOKENS: Mapping[Scale, int] = {"tiny": 16, "middle": 64, "large": 128}
MICROBATCH: Mapping[Scale, int] = {"tiny": 1, "middle": 2, "large": 4}
HEADS: Mapping[Scale, tuple[int, int]] = {"tiny": (2, 8), "middle": (4, 32), "large": (4, 64)}
"""Number of attention heads, about, and width of each."""


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """A step of a reference model that is measured in a run."""

    plan: str
    scale: Scale
    microbatches: int
    """Microbatches of a rank."""


class Text(nn.Module):
    """A small model of language, with the operations that such models are made of."""

    def __init__(self, width: int, blocks: int = 2, head_width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(TextBlock(width, head_width) for _ in range(blocks)))
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return found


class TextBlock(nn.Module):
    """Attention and a gated linear unit."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.ones(width))
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        layers = self.query, self.key, self.value
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in layers
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        down: Tensor = self.down(
            functional.silu(self.gate(normed)) * functional.gelu(self.up(normed))
        )
        return x + down


class Image(nn.Module):
    """A small model of images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.batch_norm, self.group_norm = nn.BatchNorm2d(width), nn.GroupNorm(2, width)
        self.second, self.third = (
            nn.Conv2d(width, width, 3, padding=1),
            nn.Conv2d(width, 2 * width, 1, stride=2),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.batch_norm(self.first(x)))
        x = functional.max_pool2d(torch.relu(self.group_norm(self.second(x))), 2)
        found: Tensor = self.head(functional.adaptive_avg_pool2d(self.third(x), 1).flatten(1))
        return found


def reference_recipe(step: ReferenceStep, steps: int) -> Recipe:
    """Return the recipe whose steps are measured."""
    plan = Plan.parse(step.plan)
    data, tensor = plan.data_ranks, _size(plan.tensor)
    heads, head_width = HEADS[step.scale]
    width = head_width * tensor * max(1, round(heads / tensor))
    names = ("query", "key", "value", "gate", "up"), ("output", "down")
    styles = [
        {f"blocks.*.{name}": style for name in several}
        for several, style in zip(names, ("colwise", "rowwise"), strict=True)
    ]
    return Recipe(
        model=partial(Text, width, 2 * _size(plan.pipeline), head_width),
        data=[torch.zeros(TOKENS[step.scale], dtype=torch.long)] * 64,
        inputs=_same,
        loss=cross_entropy,
        optimizer=adamw,
        global_batch=data * step.microbatches * MICROBATCH[step.scale],
        microbatch=MICROBATCH[step.scale],
        steps=steps,
        stages=["embedding", "blocks.*", "head"],
        tensor=styles[0] | styles[1],
    )


def _same(batch: Any) -> Any:
    return batch


def cross_entropy(output: Tensor, batch: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), batch.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _size(size: Size | None) -> int:
    assert isinstance(size, int), "resolved"
    return size
