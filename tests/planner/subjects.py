"""What the tests of the planner trace: a small transformer, whose sizes are all different. At
module level, so that workers can be told its names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.plan import Plan
from lockstep.planner.trace import TracedStep
from lockstep.planner.tracing.tracer import StageSplit, TraceOptions, stage_split, trace_step

WIDTH, HIDDEN, HEADS, BLOCKS, WORDS, LENGTH = 16, 48, 2, 2, 40, 6
SAMPLES, GLOBAL_BATCH, MICROBATCH = 96, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        query, key, value = (
            self.projection(self.norm(x)).view(samples, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + attended.transpose(1, 2).reshape(x.shape)
        changed: Tensor = x + self.down(functional.gelu(self.up(x)))
        return changed


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.embedding(words)))
        return scores


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Takes a fifth of a trace less than AdamW."""
    return torch.optim.SGD(model.parameters(), 1e-3)


def loss(scores: Tensor, batch: Any) -> ls.Sum:
    return ls.Sum(
        functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), reduction="sum")
    )


def mean_loss(scores: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten())


def recipe(**changes: Any) -> ls.Recipe:
    """Steps of four microbatches of two samples, changed as asked."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    given: dict[str, Any] = {
        "model": Transformer,
        "data": TensorDataset(words[:, :-1], words[:, 1:]),
        "inputs": lambda batch: batch[0],
        "loss": loss,
        "weight": lambda batch: batch[1].numel(),
        "optimizer": sgd,
        "clip_norm": 1.0,
        "global_batch": GLOBAL_BATCH,
        "microbatch": MICROBATCH,
        "steps": 3,
        "stages": ["embedding", "blocks.*", "head"],
        "tensor": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    }
    return ls.Recipe(**{**given, **changes})


class Normed(nn.Module):
    """With running statistics, which data ranks exchange in the forward; and a first layer without
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.embedding(words).transpose(1, 2)).transpose(1, 2))
        return scores


class Wide(nn.Module):
    """Gradients of several of DDP's buckets: the first has 1 MiB, the others 25 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 512)
        self.layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(3)])
        self.head = nn.Linear(512, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.embedding(words)))
        return scores


CHANGES: dict[str, dict[str, Any]] = {
    "transformer": {},
    "three microbatches": {"global_batch": 6},
    "means": {"loss": mean_loss, "weight": None, "clip_norm": None},
    "bf16": {"precision": "bf16"},
    "powersgd": {"gradient_compression": "powersgd:2"},
    "quantized": {"gradient_compression": "int8"},
    "running statistics": {"model": Normed, "stages": None, "tensor": None},
    "wide": {"model": Wide, "stages": None, "tensor": None},
    "sequences": {"sequence": ls.Sequence(chunks=4)},
}
"""Recipes of which real processes train some steps, as changes of `recipe`."""


def processes(plan: str) -> int:
    """The number of processes that a plan with sizes needs."""
    parsed = Plan.parse(plan)
    return prod(size for size in parsed.axis_sizes.values() if isinstance(size, int))


@cache
def plain(plan: str, rank: int = 0) -> TracedStep:
    """The trace of a step of `recipe()`, made once."""
    return traced(plan, rank=rank)


_splits: dict[tuple[Any, ...], tuple[ls.Recipe, StageSplit]] = {}


def split(given: ls.Recipe | None, plan: Plan, chosen: TraceOptions) -> StageSplit:
    """The split of a recipe into stages, which all ranks have: made once."""
    one = replace(chosen, rank=0)
    key = (id(given), plan, *(getattr(one, each.name) for each in fields(one)))
    if key not in _splits:
        made = given or recipe()
        _splits[key] = made, stage_split(made, plan, one)
    return _splits[key][1]


def traced(
    plan: str,
    given: ls.Recipe | None = None,
    *,
    rank: int = 0,
    world_size: int | None = None,
    watch: Callable[[Any], object] | None = None,
    **options: Any,
) -> TracedStep:
    """The trace of a step of one rank."""
    size = world_size or processes(plan)
    resolved, chosen = (
        Plan.parse(plan).resolve(size),
        TraceOptions(rank=rank, world_size=size, **options),
    )
    if resolved.pipeline != 1:
        chosen = replace(chosen, boundaries=split(given, resolved, chosen).boundaries)
    return trace_step(given or recipe(), resolved, chosen, watch)
