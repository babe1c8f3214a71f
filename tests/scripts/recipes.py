"""python recipes.py NAME: small, correct recipes for tests of `lockstep verify`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

SAMPLES = 128


class Convolutions(nn.Module):
    """(batch, 1, 8, 8) images -> (batch, 10) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first_norm(self.first(x))), 2)
        x = F.max_pool2d(F.relu(self.second_norm(self.second(x))), 2)
        return self.last(x.flatten(1))


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def images() -> TensorDataset:
    """Images, labels, and a weight of 1 to 8 for each image."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    label = torch.randint(0, 10, (SAMPLES,), generator=generator)
    return TensorDataset(x, label, torch.randint(1, 9, (SAMPLES,), generator=generator))


def weighted(model: nn.Module, batch: list[Tensor]) -> ls.Loss:
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return ls.Loss((each * batch[2]).sum(), batch[2].sum().float())


def train(**changes: Any) -> None:
    given: dict[str, Any] = {
        "model": Convolutions,
        "data": images(),
        "inputs": lambda batch: batch[0],
        "loss": lambda output, batch: F.cross_entropy(output, batch[1]),
        "optimizer": adamw,
        "global_batch": 28,
        "microbatch": 4,
        "steps": 100,
        "clip_norm": 1.0,
        **changes,
    }
    ls.train(ls.Recipe(**given))


def adversaries() -> None:
    def network(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))

    data = TensorDataset(
        torch.randn(512, 2, generator=torch.Generator().manual_seed(0)) * 0.3
        + torch.tensor([2.0, -1.0])
    )
    with ls.Session(seed=0) as session:
        generator, move_generator = session.prepare(lambda: network(4, 2), adamw)
        critic, move_critic = session.prepare(lambda: network(2, 1), adamw)
        for step in session.steps(data, global_batch=64, microbatch=16, steps=50):
            for (real,) in step.microbatches():
                fake = generator(torch.randn(len(real), 4)).detach()
                step.backward(
                    F.softplus(critic(fake)).mean() + F.softplus(-critic(real)).mean(), move_critic
                )
            step.commit(move_critic)
            for (real,) in step.microbatches():
                step.backward(
                    F.softplus(-critic(generator(torch.randn(len(real), 4)))).mean(), move_generator
                )
            step.commit(move_generator, clip_norm=1.0)


def endless(shard: int, epoch: int, start: int) -> Iterator[list[Tensor]]:
    """One seventh of the images, augmented."""
    for image, *others in islice(images(), shard + 7 * start, None, 7):
        yield [image + 0.1 * torch.randn(image.shape), *others]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


RECIPES: dict[str, Callable[[], None]] = {
    "convolutions": train,
    "convolutions in bf16": lambda: train(precision="bf16"),
    "perceptron in bf16": lambda: train(model=perceptron, precision="bf16"),
    "perceptron in fp16": lambda: train(model=perceptron, precision="fp16"),
    "weights from the forward": lambda: train(model=perceptron, inputs=None, loss=weighted),
    "microbatches of the plan": lambda: train(model=perceptron, microbatch=None),
    "epochs with a short batch": lambda: train(steps=None, epochs=3, global_batch=36),
    "momentum and a schedule": lambda: train(
        optimizer=momentum, schedule=ls.warmup_cosine(warmup=4, total=20)
    ),
    "two models": adversaries,
    "a stream": lambda: train(data=ls.Stream(endless, shards=7, window=6)),
}

if __name__ == "__main__":
    RECIPES[sys.argv[1]]()
