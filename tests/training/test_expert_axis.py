"""The axis `expert` under `ls.train`: each rank holds some of the experts, and the ranks train the
model of one process, to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model.expert.models import StackedExperts
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training.subjects import each_of, state_of

import lockstep as ls
from lockstep.testing.pool import WorkerPool

WORDS, WIDTH, TOKENS, EXPERTS = 11, 6, 10, 8
PLANS = {
    2: ("expert=2", "expert=2,checkpointing=full"),
    4: (
        "expert=4",
        "replicate=2,expert=2",
        "shard=2,expert=2,checkpointing=selective",
        "expert=2,context=2,checkpointing=full",
    ),
}
"""Number of processes -> plans."""


class Block(nn.Module):
    """Attention, and a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = StackedExperts(EXPERTS)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(*heads, is_causal=True)[:, 0]
        tokens = self.second_norm(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        return x + self.dropout(self.experts(tokens, index, weights).view_as(x))  # type: ignore[no-any-return]


class Generator(nn.Module):
    """(samples, tokens) words -> (samples, tokens, WORDS) logits. Float64."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.double()

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def texts(samples: int, seed: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(WORDS, (samples, TOKENS + 1), generator=generator)
    labels = text[:, 1:].clone()
    for row, length in enumerate(torch.randint(2, TOKENS, (samples,), generator=generator)):
        labels[row, length:] = -100
    return TensorDataset(text[:, :-1].contiguous(), labels)


def first(batch: Sequence[Tensor]) -> Tensor:
    return batch[0]


def entropy(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    return ls.Sum(F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"))


def count(batch: Sequence[Tensor]) -> Tensor:
    return (batch[1] != -100).sum()


def recipe(**changes: Any) -> ls.Recipe:
    """Steps of three microbatches: with two or four ranks, some compute dummies."""
    given: dict[str, Any] = {
        "model": Generator,
        "data": texts(14),
        "inputs": first,
        "loss": entropy,
        "weight": count,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        "clip_norm": 0.5,
        "global_batch": 6,
        "microbatch": 2,
        "steps": 3,
        "sequence": ls.Sequence(chunks=4),
        "evaluation": ls.Evaluation(data=texts(5, seed=9), every=2),
        **changes,
    }
    return ls.Recipe(**given)


class Last(ls.Hook):
    def on_finish(self, run: Any) -> None:
        self.state = state_of(run.model)


Trained = tuple[dict[str, Tensor], list[float]]


def train(run_dir: str, plan: str, **changes: Any) -> Trained:
    """Return the model, the last loss and the metrics."""
    last = Last()
    result = ls.train(recipe(**changes), plan=plan, run_dir=run_dir, hooks=[last], log_every=1)
    return last.state, [result.loss, *result.metrics.values()]


def off(found: Trained, expected: Trained) -> float:
    """The largest relative difference."""
    (state, numbers), (state_of_one, numbers_of_one) = found, expected
    each = [
        float((state[name] - value).norm() / value.norm()) for name, value in state_of_one.items()
    ]
    pairs = zip(numbers, numbers_of_one, strict=True)
    return max(*each, *(abs(one - other) / abs(other) for one, other in pairs))


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    (found,) = pool.run(1, train, str(tmp_path_factory.mktemp("alone")), "replicate=1")
    return found  # type: ignore[no-any-return]


def train_each(folder: str, plans: Sequence[str]) -> list[Any]:
    return each_of(train, folder, [(plan,) for plan in plans])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", PLANS)
def test_ranks_that_share_out_experts_train_the_model_of_one_process(
    pool: WorkerPool, tmp_path: Path, alone: Trained, size: int
) -> None:
    plans = PLANS[size]
    for rank in pool.run(size, train_each, str(tmp_path), plans, timeout_seconds=110):
        for plan, found in zip(plans, rank, strict=True):
            assert not isinstance(found, str), (plan, found)
            assert off(found, alone) < 1e-12, plan
