"""What the tests of pipelines compute, and how: on one process, and on the ranks of a pipeline. At
module level, for workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._subclasses.fake_tensor  # here, so that not every worker imports it
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from worlds import all_ranks

from lockstep.assignment import MicrobatchAssignment
from lockstep.base.errors import LossError
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import World
from lockstep.model.initialization.deferred_init import DeferredModel, build
from lockstep.model.initialization.initial_model import InitialModel
from lockstep.model.pipeline.boundary import Arguments, PipelineLoss, PipelineMicrobatch
from lockstep.model.pipeline.pipeline import Pipeline
from lockstep.model.pipeline.stages import (
    STAGES_PER_RANK,
    Stages,
    keep_only_parts,
    sequential_parts,
)
from lockstep.model.random_streams import ModuleRandomStreams
from lockstep.model.running_statistics import RunningStatistics
from lockstep.plan import Plan, Schedule
from lockstep.training.reducers.agreement import StepAgreement
from lockstep.training.reducers.post_backward import PostBackwardReducer
from lockstep.training.reducers.tied import TiedGradients

KEY, WIDTH, CONTEXT = 3, 8, 6


def mlp(layers_after: int = 4) -> nn.Module:
    """Parts that change what they receive in place, and an odd number of them."""
    layers = [
        nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
        for _ in range(layers_after)
    ]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def recomputed_mlp() -> nn.Module:
    return nn.Sequential(
        *(
            Recomputed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)))
            for _ in range(5)
        )
    )


class Two(nn.Module):
    """Takes and returns a tensor with a gradient, one without, and one of whole numbers; the first
    is a view that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, both: Any) -> Any:
        x, mask, number = (
            both
            if isinstance(both, tuple)
            else (both, (both > 0).to(both.dtype), torch.arange(both.shape[1]))
        )
        return (self.layer(x) * mask + number).T.contiguous().T, mask, number + 1


class First(nn.Module):
    def forward(self, three: Any) -> Tensor:
        return three[0].flatten().view(-1, WIDTH)  # type: ignore[no-any-return]


def tuples() -> nn.Module:
    return nn.Sequential(*(Two() for _ in range(4)), First())


class Embedding(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.bytes, self.positions, self.dropout = (
            nn.Embedding(16, WIDTH),
            nn.Embedding(CONTEXT, WIDTH),
            nn.Dropout(dropout),
        )

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
        self.norm, self.qkv, self.projection = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.dropout = nn.Dropout(dropout)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 16),
            nn.GELU(),
            nn.Linear(16, WIDTH),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.perceptron(x)


class GPT(nn.Module):
    """That of examples/gpt.py, with its first and last layers as modules: tied, and its output a
    dict."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = Embedding(dropout)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(3)))
        self.head = Head(self.embedding.bytes)

    def forward(self, text: Tensor) -> dict[str, Tensor]:
        return self.head(self.blocks(self.embedding(text)))  # type: ignore[no-any-return]


def normed() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.3))
            for _ in range(5)
        )
    )


class Ignores(nn.Module):
    """Looks at the size of what it receives, and at nothing else of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.tanh().expand_as(x)


def ignoring() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Ignores())


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).detach()


def detached() -> nn.Module:
    return nn.Sequential(Detached(), nn.Linear(WIDTH, WIDTH))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str] | None]] = {
    "mlp": (mlp, None),
    "deep": (partial(mlp, 8), None),
    "recomputed": (recomputed_mlp, None),
    "ignoring": (ignoring, None),
    "detached": (detached, None),
    "tuples": (tuples, None),
    "normed": (normed, None),
    "gpt": (GPT, ["embedding", "blocks.*", "head"]),
}


def microbatches(
    name: str, sizes: list[int], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor, float]]:
    """(inputs, targets, scale) of each: scales as weights that are known before."""
    generator = torch.Generator().manual_seed(1)
    if name == "gpt":
        text = [torch.randint(16, (size, CONTEXT + 1), generator=generator) for size in sizes]
        return [(each[:, :-1], each[:, 1:], 0.1 + place) for place, each in enumerate(text)]
    rows = [
        torch.randn(2, size, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for size in sizes
    ]
    return [(each[0], each[1], 0.1 + place) for place, each in enumerate(rows)]


def total(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, dict):
        return nn.functional.cross_entropy(
            output["logits"].flatten(0, 1), target.flatten(), reduction="sum"
        )
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
    streams = ModuleRandomStreams(model, sequential_parts(model, patterns), begin)
    records = []
    for place, (inputs, target, scale) in enumerate(microbatches(name, sizes, dtype)):
        streams.start(position(place))
        loss = total(model(inputs), target)
        loss.backward(torch.tensor(scale, dtype=loss.dtype))
        records.append([loss.item() * scale, scale])
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }, records


def staged(
    name: str, schedule: Schedule, dtype: torch.dtype, axis: World | None = None
) -> tuple[nn.Module, Pipeline, TiedGradients]:
    """This rank's part of a model, as a plan makes it. `axis`: the pipeline's ranks, None: all."""
    axis = axis or all_ranks()
    factory, patterns = MODELS[name]
    deferred = DeferredModel.build(factory, KEY)
    model = deferred.module
    stages = Stages.split(model, patterns, ranks=axis.size, per_rank=STAGES_PER_RANK[schedule])
    streams = ModuleRandomStreams(model, stages.parts, begin)
    built = InitialModel(model, deferred, None)
    for part in stages.parts_on_rank(axis.rank):
        built.materialize(model.get_submodule(part), torch.device("cpu"))
    keep_only_parts(model, stages.parts_on_rank(axis.rank))
    model.to(dtype)
    tied = TiedGradients(dict(model.named_parameters()), stages.shared_parameters, axis)
    return model, Pipeline(model, stages, axis, streams, schedule=schedule), tied


def in_two_pipelines(name: str, schedule: Schedule, steps: list[list[int]]) -> list[Any]:
    """Of each step, the gradients here, and what was said of all microbatches: values, weights,
    whether a flag was raised."""
    mesh = Mesh.of(all_ranks(), Plan(replicate=2, pipeline=2, transport="torch"))
    model, pipeline, tied = staged(name, schedule, torch.float32, mesh.axis("pipeline"))
    parameters = list(model.parameters())
    reducer = PostBackwardReducer(
        parameters, mesh, max_microbatches=8, agreement=StepAgreement(mesh.summed())
    )
    found = []
    for step, sizes in enumerate(steps):
        reducer.begin_step(len(sizes), MicrobatchAssignment(2))
        given = items(name, sizes, torch.float32)
        rows = pipeline.run(
            [given[place] for place in MicrobatchAssignment(2).indices(len(sizes), mesh.data.rank)],
            columns=2,
        )
        stats = reducer.reduce(
            list(rows[:, 0]), list(rows[:, 1]), flag=dist.get_rank() == 1 and step == 0
        )
        tied.sum()
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        assert stats.weights is not None
        found.append(
            (
                gradients,
                torch.stack([torch.as_tensor(stats.values), stats.weights], dim=1).tolist(),
                stats.flags,
            )
        )
    return found


def items(name: str, sizes: list[int], dtype: torch.dtype) -> list[PipelineMicrobatch]:
    def score(target: Tensor, scale: float, output: Any) -> PipelineLoss:
        loss = total(output, target)
        return PipelineLoss(
            loss, torch.tensor(scale, dtype=loss.dtype), [loss.item() * scale, scale]
        )

    return [
        PipelineMicrobatch(
            position(place), partial(Arguments.of, inputs), partial(score, target, scale)
        )
        for place, (inputs, target, scale) in enumerate(microbatches(name, sizes, dtype))
    ]


def in_a_pipeline(
    names: list[str], schedule: Schedule, steps: list[list[int]]
) -> dict[str, list[Any]]:
    """Of each model and each step: `on_one_process`'s gradients and records, and the names of the
    parameters that are counted here."""
    found: dict[str, list[Any]] = {}
    for name in names:
        model, pipeline, tied = staged(name, schedule, torch.float32)
        for sizes in steps:
            model.zero_grad()
            records = pipeline.run(items(name, sizes, torch.float32), columns=2).tolist()
            tied.sum()
            gradients = {
                name: parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
            counted = [
                name for name, parameter in model.named_parameters() if tied.counts(parameter)
            ]
            found.setdefault(name, []).append((gradients, records, counted))
    return found


Masks = dict[str, list[Tensor]]


def watch_dropout(model: nn.Module) -> Masks:
    """What each dropout let through, forward after forward."""
    masks: Masks = {}

    def note(name: str, _: nn.Module, given: tuple[Tensor], made: Tensor) -> None:
        masks.setdefault(name, []).append((made != 0) | (given[0] == 0))

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(partial(note, name))
    return masks


def masks_on_one_process(name: str, sizes: list[int]) -> Masks:
    factory, patterns = MODELS[name]
    model = build(factory, KEY)
    masks = watch_dropout(model)
    streams = ModuleRandomStreams(model, sequential_parts(model, patterns), begin)
    for place, (inputs, _, _) in enumerate(microbatches(name, sizes, torch.float32)):
        streams.start(position(place))
        model(inputs)
    return masks


def masks_in_a_pipeline(name: str, schedule: Schedule, sizes: list[int]) -> Masks:
    """Those of this rank's part of the model; a first run has learned the shapes."""
    model, pipeline, _ = staged(name, schedule, torch.float32)
    pipeline.run(items(name, sizes, torch.float32), columns=2)
    masks = watch_dropout(model)
    pipeline.run(items(name, sizes, torch.float32), columns=2)
    return masks


def statistics(
    name: str, schedule: Schedule, steps: list[list[int]], watched: bool
) -> dict[str, Tensor]:
    """The buffers of this rank's part of the model after some steps. `watched`: changed at the end
    of each, not by the forwards."""
    mesh = Mesh.of(all_ranks(), Plan(pipeline=dist.get_world_size()))
    watchers: list[RunningStatistics] = []

    @contextmanager
    def around(place: int) -> Iterator[None]:
        watchers[place].discard()
        yield

    def ran(place: int) -> None:
        watchers[place].note_microbatch()

    model, pipeline, _ = staged(name, schedule, torch.float32)
    if watched:
        pipeline.watch(around, ran)
    watchers += [RunningStatistics(module, mesh) for module in pipeline.modules if watched]
    for sizes in steps:
        for watcher in watchers:
            watcher.begin(compare=False)
        pipeline.run(items(name, sizes, torch.float32), columns=2)
        for watcher in watchers:
            watcher.check(compare=False)
            watcher.commit(MicrobatchAssignment(1), len(sizes), apply=True)
    return dict(model.named_buffers())


def statistics_on_one_process(name: str, steps: list[list[int]]) -> dict[str, Tensor]:
    model = build(MODELS[name][0], KEY)
    for sizes in steps:
        for inputs, _, _ in microbatches(name, sizes, torch.float32):
            model(inputs)
    return dict(model.named_buffers())


def values(name: str, schedule: Schedule) -> dict[str, Tensor]:
    return dict(staged(name, schedule, torch.float32)[0].state_dict())


def outputs(name: str, schedule: Schedule, sizes: list[int]) -> list[Any]:
    """Of each microbatch, with a training step before and after: what the evaluation finds on the
    last rank."""
    model, pipeline, _ = staged(name, schedule, torch.float32)
    pipeline.run(items(name, sizes, torch.float32), columns=2)
    model.eval()
    rows = microbatches(name, sizes, torch.float32)
    found = pipeline.forward(
        [
            PipelineMicrobatch(position(0), partial(Arguments.of, x), lambda output: output)
            for x, _, _ in rows
        ]
    )
    model.train()
    pipeline.run(items(name, sizes, torch.float32), columns=2)
    return found


def failing(name: str, schedule: Schedule, where: str) -> tuple[str, str, list[list[float]]]:
    """The error of a step in which something fails, and what a step after it records."""
    model, pipeline, _ = staged(name, schedule, torch.float32)
    given = items(name, [2, 2, 2, 2], torch.float32)
    if where == "shape":
        pipeline.run(given, columns=2)
    bad = [*given[:2], spoil(given[2], where), given[3]]
    part = next(part for part in pipeline.stages.parts_on_rank(pipeline.world.rank))
    hook = model.get_submodule(part).register_forward_hook(
        partial(spoil_output, where, dist.get_rank())
    )
    error = ("", "")
    try:
        pipeline.run(bad, columns=2)
    except Exception as raised:
        error = type(raised).__name__, str(raised)
    hook.remove()
    return *error, pipeline.run(given, columns=2).tolist()


def spoil(item: PipelineMicrobatch, where: str) -> PipelineMicrobatch:
    def fails(*_: Any) -> Any:
        raise (
            LossError("this microbatch is spoilt")
            if where == "score"
            else ValueError("this microbatch is spoilt")
        )

    if where == "score":
        return PipelineMicrobatch(item.position, item.inputs, fails)
    return PipelineMicrobatch(item.position, fails, item.score) if where == "inputs" else item


def spoil_output(where: str, rank: int, _: nn.Module, __: Any, output: Any) -> Any:
    if rank == 0 and where == "boundary":
        return {"output": output}
    if rank == 0 and where == "shape":
        return output[:1]
    if rank == 1 and where == "part" and bool(output.detach().any()):
        raise ArithmeticError("this part is spoilt")
    return output
