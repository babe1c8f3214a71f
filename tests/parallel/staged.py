"""What the tests of pipelines compute, and how: on one process, and on the ranks of a pipeline. At module level, for workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.comm.group import World
from lockstep.parallel.build import Deferred, build
from lockstep.parallel.layout import Built
from lockstep.parallel.pipeline import PER_RANK, Item, Pipeline, Schedule, Scored
from lockstep.parallel.stages import Stages, keep_only, parts_of
from lockstep.parallel.streams import Streams
from lockstep.parallel.tied import TiedGradients

KEY, WIDTH, CONTEXT = 3, 8, 6


def mlp(dropout: float = 0.0) -> nn.Module:
    """Parts that change what they receive in place, and one more part than two stages a rank on two ranks."""
    layers = [nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def recomputed_mlp() -> nn.Module:
    return nn.Sequential(*(Recomputed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))) for _ in range(5)))


class Two(nn.Module):
    """Takes and returns a tensor with a gradient, one without, and one of whole numbers; the first is a view that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, both: Any) -> Any:
        x, mask, number = both if isinstance(both, tuple) else (both, (both > 0).to(both.dtype), torch.arange(both.shape[1]))
        return (self.layer(x) * mask + number).T.contiguous().T, mask, number + 1


class First(nn.Module):
    def forward(self, three: Any) -> Tensor:
        return three[0].flatten().view(-1, WIDTH)  # type: ignore[no-any-return]


def tuples() -> nn.Module:
    return nn.Sequential(*(Two() for _ in range(4)), First())


class Embedding(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.bytes, self.positions, self.dropout = nn.Embedding(16, WIDTH), nn.Embedding(CONTEXT, WIDTH), nn.Dropout(dropout)

    def forward(self, text: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.bytes(text) + self.positions.weight[: text.shape[1]])
        return x


class Head(nn.Module):
    def __init__(self, tied: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(WIDTH), tied.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": nn.functional.linear(self.norm(x), self.weight)}


class Block(nn.Module):
    """That of examples/gpt.py."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.projection = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.perceptron = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.perceptron(x)


class GPT(nn.Module):
    """That of examples/gpt.py, with its first and last layers as modules: tied, and its output a dict."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = Embedding(dropout)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(3)))
        self.head = Head(self.embedding.bytes)

    def forward(self, text: Tensor) -> dict[str, Tensor]:
        return self.head(self.blocks(self.embedding(text)))  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str] | None]] = {
    "mlp": (mlp, None),
    "mlp with dropout": (partial(mlp, 0.1), None),
    "recomputed": (recomputed_mlp, None),
    "tuples": (tuples, None),
    "gpt": (GPT, ["embedding", "blocks.*", "head"]),
}


def microbatches(name: str, sizes: list[int], dtype: torch.dtype) -> list[tuple[Tensor, Tensor, float]]:
    """(inputs, targets, scale) of each: scales as weights that are known before."""
    generator = torch.Generator().manual_seed(1)
    if name == "gpt":
        text = [torch.randint(16, (size, CONTEXT + 1), generator=generator) for size in sizes]
        return [(each[:, :-1], each[:, 1:], 0.1 + place) for place, each in enumerate(text)]
    rows = [torch.randn(2, size, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    return [(each[0], each[1], 0.1 + place) for place, each in enumerate(rows)]


def total(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, dict):
        return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten(), reduction="sum")
    return ((output - target) ** 2).sum() + torch.rand(()) * output.sum()


def begin(key: int) -> None:
    torch.default_generator.manual_seed(key)


def position(place: int) -> tuple[int, ...]:
    return (0, 5, 1, place, 0)


Found = tuple[dict[str, Tensor], list[list[float]]]


def on_one_process(name: str, sizes: list[int], dtype: torch.dtype) -> Found:
    """Gradients by name, and each microbatch's record."""
    factory, patterns = MODELS[name]
    model = build(factory, KEY).to(dtype)
    streams = Streams(model, parts_of(model, patterns), begin)
    records = []
    for place, (inputs, target, scale) in enumerate(microbatches(name, sizes, dtype)):
        streams.start(position(place))
        loss = total(model(inputs), target)
        loss.backward(torch.tensor(scale, dtype=loss.dtype))
        records.append([float(loss) * scale, scale])
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}, records


def world() -> World:
    return World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"), owns_group=False)


def staged(name: str, schedule: Schedule, dtype: torch.dtype) -> tuple[nn.Module, Pipeline, TiedGradients]:
    """This rank's part of a model, as a plan makes it."""
    factory, patterns = MODELS[name]
    deferred = Deferred.build(factory, KEY)
    model = deferred.module
    stages = Stages.of(model, patterns, ranks=dist.get_world_size(), per_rank=PER_RANK[schedule])
    streams = Streams(model, stages.parts, begin)
    built = Built(model, deferred, None)
    for part in stages.names_on(dist.get_rank()):
        built.fill(model.get_submodule(part), torch.device("cpu"))
    keep_only(model, stages.names_on(dist.get_rank()))
    model.to(dtype)
    return model, Pipeline(model, stages, world(), streams, schedule=schedule), TiedGradients(model, stages.tied, world())


def items(name: str, sizes: list[int], dtype: torch.dtype) -> list[Item]:
    def score(target: Tensor, scale: float, output: Any) -> Scored:
        loss = total(output, target)
        return Scored(loss, torch.tensor(scale, dtype=loss.dtype), [float(loss) * scale, scale])

    return [
        Item(position(place), partial(lambda inputs: inputs, inputs), partial(score, target, scale))
        for place, (inputs, target, scale) in enumerate(microbatches(name, sizes, dtype))
    ]


def in_a_pipeline(name: str, schedule: Schedule, steps: list[list[int]], dtype: torch.dtype = torch.float32) -> list[Any]:
    """Of each step, which parameters are counted here, and what `on_one_process` returns of this rank's."""
    model, pipeline, tied = staged(name, schedule, dtype)
    found = []
    for sizes in steps:
        model.zero_grad()
        records = pipeline.run(items(name, sizes, dtype), columns=2)
        tied.sum()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        found.append((gradients, records.tolist(), [name for name, parameter in model.named_parameters() if tied.counts(parameter)]))
    return found
