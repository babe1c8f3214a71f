"""A data-parallel trainer in one process: each rank is a copy of the model. A faulty engine
overrides a method.

It writes its traces with the real `Tracer`, as a session does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lockstep.assignment import contiguous_range
from lockstep.data.digests import sample_digests
from lockstep.evidence.tolerance import MeasuredRounding
from lockstep.evidence.trace import Trace, read_traces
from lockstep.evidence.tracer import Tracer
from lockstep.keys import key
from lockstep.verify.jobs import TraceRequest
from lockstep.verify.probe import change_model

SAMPLES = 64
FEATURES = 6
TOKENS = 5
Gradients = dict[str, Tensor]


class Network(nn.Module):
    """A model with dropout, BatchNorm, a buffer of its own, and a layer that only samples with an
    odd index use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.2)
        self.odd = nn.Linear(16, 16)
        self.last = nn.Linear(16, TOKENS)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, sample: Tensor, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        x = self.dropout(x)
        if bool((sample[0] % 2).item()):
            x = x + torch.tanh(self.odd(x))
        return self.last(x * self.scale)


def dataset() -> tuple[Tensor, Tensor, Tensor]:
    """Return features, targets, and a mask with a different number of tokens for each sample."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = torch.randn(SAMPLES, TOKENS, generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (SAMPLES, 1), generator=generator)
    return x, y, (torch.arange(TOKENS) < lengths).float()


class Engine:
    """A correct engine."""

    microbatch: ClassVar[int] = 4
    global_batch: ClassVar[int] = 24
    clip: ClassVar[float | None] = 0.05
    model: ClassVar[type[nn.Module]] = Network
    compute: ClassVar[torch.dtype] = torch.float32
    weighted: ClassVar[bool] = True
    """True if the loss has a weight."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int = 1,
        steps: int = 3,
        seed: int = 0,
        noise: int | None = None,
        float64: bool = False,
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.size, self.steps, self.seed = folder, ranks, steps, seed
        self.request = TraceRequest(folder=folder, steps=steps, noise_seed=noise, float64=float64)
        self.data = [part.double() if float64 else part for part in dataset()]
        torch.manual_seed(self.key(1))
        model = self.model()
        self.models = [self.start(copy.deepcopy(model), rank) for rank in range(ranks)]
        for each in self.models:
            each.train()
            change_model(each, self.request)
        self.optimizers = [self.optimizer(each) for each in self.models]
        self.statistics: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self.tracers = [
            Tracer(
                self.request.folder,
                self.request.steps,
                rank=r,
                world_size=ranks,
                plan=f"replicate={ranks}",
                replicated=True,
                writes=r == 0,
            )
            for r in range(ranks)
        ]

    def key(self, *parts: int) -> int:
        return key(self.seed, *parts) >> 1

    # Faulty engines override these.

    def start(self, model: nn.Module, rank: int) -> nn.Module:
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def data_of(self, rank: int) -> list[Tensor]:
        return self.data

    def samples(self, step: int, index: int) -> list[int]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.key(2, step)))[
            : self.global_batch
        ].tolist()
        return [
            int(sample) for sample in order[index * self.microbatch : (index + 1) * self.microbatch]
        ]

    def mine(self, rank: int) -> Sequence[int]:
        """Return the rank's microbatches in the order in which it computes them."""
        return contiguous_range(self.count, rank, self.size)

    def stream(self, step: int, index: int, rank: int) -> int:
        return self.key(3, step, index)

    def factor(self, step: int, index: int, rank: int) -> float:
        """Return a factor on the seed of the backward, which is 1 / weight of the whole batch."""
        return 1.0

    def accumulate(self, step: int, rank: int, parts: list[Gradients]) -> Gradients:
        return added(parts)

    def reduce(self, step: int, locals_: list[Gradients]) -> list[Gradients]:
        """Return the reduced gradients of each rank."""
        return [added(locals_)] * self.size

    def norm(self, step: int, rank: int, reduced: Gradients, local: Gradients) -> float:
        return total_norm(reduced)

    def rate(self, step: int, rank: int) -> float:
        return 1e-2 * 0.9**step

    def update(self, step: int, rank: int) -> None:
        self.optimizers[rank].step()

    def running(self, rank: int) -> list[int]:
        """Return the microbatches whose statistics update the rank's buffers, in order."""
        return list(range(self.count))

    def finish(self, step: int, rank: int) -> None:
        """Change buffers after the update."""

    def loss(self, rank: int, parts: dict[int, float]) -> float:
        return sum(parts.values())

    # A step.

    @property
    def count(self) -> int:
        return self.global_batch // self.microbatch

    def run(self) -> Trace:
        for rank, (model, tracer) in enumerate(zip(self.models, self.tracers, strict=True)):
            tracer.metadata(
                batchnorm=any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
            )
            tracer.start(0, model.named_parameters(), model.named_buffers())
            if self.size == 1 and rank == 0:
                tracer.watch(0, model.named_parameters())
        for step in range(self.steps):
            self.step(step)
        for tracer in self.tracers:
            tracer.close()
        (trace,) = read_traces(self.folder)
        return trace

    def step(self, step: int) -> None:
        mask = self.data[2]
        batch = [sample for index in range(self.count) for sample in self.samples(step, index)]
        self.weight = float(mask[batch].sum())
        losses: dict[int, dict[int, float]] = {rank: {} for rank in range(self.size)}
        locals_ = []
        for rank, model in enumerate(self.models):
            parts = []
            for index in self.mine(rank):
                part, losses[rank][index] = self.one(step, index, rank, model)
                parts.append(part)
            locals_.append(self.accumulate(step, rank, parts))
        for rank, reduced in enumerate(self.reduce(step, locals_)):
            self.commit(
                step,
                rank,
                reduced,
                locals_[rank],
                self.loss(rank, {i: v for each in losses.values() for i, v in each.items()}),
            )

    def one(self, step: int, index: int, rank: int, model: nn.Module) -> tuple[Gradients, float]:
        x, y, mask = self.data_of(rank)
        samples = self.samples(step, index)
        torch.manual_seed(self.stream(step, index, rank))
        self.tracers[rank].before_forward()
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        batch = torch.tensor(samples)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.compute is torch.bfloat16):
            output = model(batch, x[batch])
        total = (
            (((output - y[batch]) ** 2) * mask[batch]).sum()
            / self.weight
            * self.factor(step, index, rank)
        )
        named = dict(model.named_parameters())
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        found = {
            name: gradient
            for name, gradient in zip(named, gradients, strict=True)
            if gradient is not None
        }
        self.note(index, model, kept)
        self.tracers[rank].microbatch(
            0,
            step,
            index,
            samples,
            sample_digests([x[batch], y[batch]]),
            [(name, found.get(name)) for name in named],
        )
        return found, float(total.detach())

    def note(self, index: int, model: nn.Module, kept: dict[str, Tensor]) -> None:
        """Record what the forward did to the running statistics, and undo it."""
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                self.statistics[index, name] = ((buffer - 0.9 * kept[name]).clone(), buffer)
            buffer.copy_(kept[name])

    def commit(
        self, step: int, rank: int, reduced: Gradients, local: Gradients, loss: float
    ) -> None:
        model, optimizer, tracer = self.models[rank], self.optimizers[rank], self.tracers[rank]
        tracer.gradients(
            0, step, [(name, reduced.get(name)) for name, _ in model.named_parameters()]
        )
        norm = self.norm(step, rank, reduced, local)
        factor = min(1.0, self.clip / norm) if self.clip is not None else 1.0
        for name, parameter in model.named_parameters():
            parameter.grad = reduced[name] * factor if name in reduced else None
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step, rank)
        self.update(step, rank)
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                for index in self.running(rank):
                    buffer.mul_(0.9).add_(self.statistics[index, name][0])
            elif name.endswith("num_batches_tracked"):
                buffer += len(self.running(rank))
        self.finish(step, rank)
        tracer.step(
            0,
            step,
            loss=loss,
            weight=self.weight if self.weighted else None,
            norm=norm,
            lr=self.rate(step, rank),
            parameters=model.named_parameters(),
            buffers=model.named_buffers(),
            states=states(model, optimizer),
        )


def added(parts: Sequence[Gradients]) -> Gradients:
    """Return the sum, added one after another as in `.grad`."""
    total: Gradients = {}
    for part in parts:
        for name, gradient in part.items():
            total[name] = total[name] + gradient if name in total else gradient.clone()
    return total


def total_norm(gradients: Gradients) -> float:
    return (
        float(
            torch.linalg.vector_norm(
                torch.stack([gradient.norm() for gradient in gradients.values()])
            )
        )
        if gradients
        else 0.0
    )


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for what, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{name}/{what}", value


def with_rounding(
    kind: Callable[..., Any], folder: Path, **given: Any
) -> tuple[Trace, MeasuredRounding]:
    """Return the reference of a class of engines, and its rounding."""
    reference = kind(folder / "reference", **given).run()
    perturbed = [
        kind(folder / f"perturbed-{noise}", noise=noise, **given).run() for noise in range(3)
    ]
    return reference, MeasuredRounding(reference, perturbed)
