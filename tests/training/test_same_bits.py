"""Laws 2 and 5: with numerics=bitwise the model has the same bits at any world size, whatever it is
made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiers import tiered
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset
from training.subjects import (
    DATA_PLANS,
    EachState,
    adamw,
    each_of,
    recipe,
    rows,
    same,
    samples_at,
    squared_error,
)

import lockstep as ls
from lockstep.testing.pool import WorkerPool

ALONE = "replicate=1"
BOTH = "replicate=2,shard=2"
PLANS = {
    **DATA_PLANS,
    "replicate=2,transport=torch": 2,
    "shard=2,transport=torch": 2,
    "replicate=2,checkpointing=full": 2,
    "shard=2,sharding=gradients,checkpointing=selective": 2,
}
"""And the processes that they need."""
TELLING = ["replicate=3", "shard=2", BOTH, "replicate=2,transport=torch"]
"""Plans that stand for the others with every change."""
SAMPLES = 100
STEPS = 3
SEEN_ONCE = samples_at(32, 33, of=SAMPLES)[0]
"""The first sample of step 1 where a step has 32 samples, and in no other step."""


class Everything(nn.Module):
    """Dropout, BatchNorm, tied weights, and, if they are wanted, parts that some microbatches, one
    step or no step at all uses."""

    def __init__(self, parts: bool = True) -> None:
        super().__init__()
        self.parts = parts
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.hidden = nn.Linear(8, 8)
        if parts:
            self.sometimes = nn.Linear(8, 8)
            self.once = nn.Linear(8, 8)
            self.never = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor, token: Tensor) -> Tensor:
        x = torch.tanh(self.hidden(self.dropout(self.norm(self.embedding(token)))))
        if self.parts and index[0] % 2:
            x = x + self.sometimes(x)
        if self.parts and bool((index == SEEN_ONCE).any()):
            x = x + self.once(x)
        return self.head(x)


def tokens() -> TensorDataset:
    drawn = torch.randint(11, (2, SAMPLES), generator=torch.Generator().manual_seed(3))
    return TensorDataset(torch.arange(SAMPLES), *drawn)


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0], batch[1]), batch[2])


def loss_in_float64(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0], batch[1]).double(), batch[2])


def weighted_loss(model: nn.Module, batch: Sequence[Tensor]) -> ls.Loss:
    each = cross_entropy(model(batch[0], batch[1]), batch[2], reduction="none")
    return ls.Loss((each * batch[1] / 3).sum(), (batch[1] / 3).sum())


def two_terms(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Any]:
    output = model(batch[0], batch[1])
    return {
        "entropy": ls.Sum(cross_entropy(output, batch[2], reduction="sum")),
        "size": (output**2).mean(),
    }


def count(batch: Sequence[Tensor]) -> dict[str, Tensor]:
    return {"entropy": (batch[1] > 3).sum()}


def foreach_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3, foreach=True)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3, fused=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.3
    )


def everything(**changes: Any) -> ls.Recipe:
    given = {
        "model": Everything,
        "data": tokens(),
        "loss": loss,
        "global_batch": 32,
        "clip_norm": 0.5,
        "steps": STEPS,
    }
    return recipe(**{**given, **changes})


def in_two_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Widened(nn.Linear(8, 8).double()), nn.Linear(8, 3))


class Widened(nn.Module):
    """A layer that computes in float64 between two that do not."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.double())).float()


class LaidOutOtherwise(nn.Module):
    """Parameters that are dense and not contiguous, and one that is not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(3, 12).t())
        self.strided = nn.Parameter(torch.randn(3, 6)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        features = self.convolution(x.reshape(-1, 2, 1, 3)).flatten(1)
        return features @ self.transposed @ self.strided


FEW: dict[str, Any] = {
    "model": lambda: Everything(parts=False),
    "optimizer": foreach_adamw,
    "global_batch": 12,
    "steps": 2,
}
"""Three microbatches a step, for what depends on neither parts nor counts."""
CASES: dict[str, dict[str, Any]] = {
    "AdamW (foreach), 8 microbatches": {"optimizer": foreach_adamw},
    "momentum SGD, 8 microbatches": {"optimizer": momentum},
    "AdamW (fused), 7 microbatches, the last one short": {
        "optimizer": fused_adamw,
        "global_batch": 27,
    },
    "weights from the forward, one microbatch": {**FEW, "loss": weighted_loss, "global_batch": 4},
    "AdamW (foreach), 7 microbatches": {**FEW, "global_batch": 28},
    "epochs with a short last batch of 1 microbatch": {
        **FEW,
        "global_batch": 32,
        "steps": None,
        "epochs": 1,
    },
    "weights from the forward": {**FEW, "loss": weighted_loss},
    "two terms": {**FEW, "loss": two_terms, "weight": count},
    "two terms, one microbatch": {**FEW, "loss": two_terms, "weight": count, "global_batch": 4},
    "a loss in float64": {**FEW, "loss": loss_in_float64},
    "bf16": {**FEW, "precision": "bf16"},
    "fp16": {**FEW, "precision": "fp16"},
    "parameters in float32 and float64": {
        "model": in_two_dtypes,
        "loss": squared_error,
        "data": rows(48),
        "optimizer": adamw,
        "global_batch": 28,
    },
    "parameters that are not contiguous": {
        "model": LaidOutOtherwise,
        "loss": squared_error,
        "data": rows(48),
        "optimizer": momentum,
        "global_batch": 28,
        "clip_norm": 0.1,
    },
}
USES_EVERYTHING = [name for name in CASES if "8 microbatches" in name]
SOME = list(CASES)[:4]
COMPARED = ["momentum SGD, 8 microbatches", "parameters that are not contiguous"]
"""Trained in fast numerics too."""
BRIEF = {
    BOTH: SOME[::2],
    "shard=2": [
        *SOME,
        "AdamW (foreach), 7 microbatches",
        "weights from the forward",
        "two terms, one microbatch",
        "bf16",
        "fp16",
    ],
}
"""Fewer cases of plans that take long; shard=3, which is slow, has them all."""
UNSHARDED = ("parameters in float32 and float64", "parameters that are not contiguous")
"""FSDP2 wants one dtype in a group of parameters, and contiguous ones."""


def cases(plan: str, numerics: str) -> list[str]:
    """All for a few plans, some for the others."""
    names = list(CASES) if plan in (ALONE, "replicate=3", "shard=3") else SOME
    if numerics == "fast":
        names = COMPARED
    elif plan in BRIEF:
        names = BRIEF[plan]
    return [name for name in names if "shard" not in plan or name not in UNSHARDED]


def train_all_cases(run_dir: str, plan: str) -> dict[tuple[str, str], Any]:
    found = {}
    for numerics in ("bitwise", "fast"):
        for name in cases(plan, numerics):
            weights = EachState()
            result = ls.train(
                everything(**CASES[name]),
                plan=f"{plan},numerics={numerics}",
                run_dir=f"{run_dir}/{numerics}/{name}",
                hooks=[weights],
            )
            found[numerics, name] = (result.fingerprint, result.loss, weights.states)
    return found


@pytest.fixture(scope="module")
def trained(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Returns, given a plan, what each rank found by numerics and case."""
    return cache(
        lambda plan: pool.run(
            PLANS[plan], train_all_cases, str(tmp_path_factory.mktemp("runs")), plan
        )
    )


@pytest.mark.parametrize("plan", tiered(PLANS, always=TELLING, most=0))
def test_the_fingerprint_and_the_loss_are_those_of_one_process(
    trained: Callable[..., list[Any]], plan: str
) -> None:
    alone = trained(ALONE)[0]
    for rank, found in enumerate(trained(plan)):
        wrong = [
            name
            for name in cases(plan, "bitwise")
            if found["bitwise", name][:2] != alone["bitwise", name][:2]
        ]
        assert not wrong, f"on rank {rank}"


def test_the_cases_have_fingerprints_of_their_own(trained: Callable[..., list[Any]]) -> None:
    found = trained(ALONE)[0]
    assert len({found["bitwise", name][0] for name in CASES}) >= len(CASES) - 1


@pytest.mark.parametrize("plan", tiered(PLANS, always=TELLING, most=1))
def test_a_parameter_moves_in_exactly_the_steps_that_use_it(
    trained: Callable[..., list[Any]], plan: str
) -> None:
    expected = {
        "never": [False, False, False],
        "once": [False, True, False],
        "sometimes": [True, True, True],
        "hidden": [True, True, True],
    }
    for rank, found in enumerate(trained(plan)):
        for case, (_, _, states) in found.items():
            if case[1] not in USES_EVERYTHING:
                continue
            for part in (f"{layer}.{kind}" for layer in expected for kind in ("weight", "bias")):
                moved = [not same(one[part], other[part]) for one, other in pairwise(states)]
                assert moved == expected[part.partition(".")[0]], f"rank {rank}, {case}, {part}"
            assert same(states[-1]["head.weight"], states[-1]["embedding.weight"]), case


@pytest.mark.parametrize("plan", tiered(PLANS, always=TELLING, most=1))
def test_fast_and_bitwise_differ_by_rounding_only(
    trained: Callable[..., list[Any]], plan: str
) -> None:
    for name in cases(plan, "fast"):
        fast = trained(plan)[0]["fast", name][2][-1]
        for part, value in trained(ALONE)[0]["bitwise", name][2][-1].items():
            torch.testing.assert_close(fast[part], value, rtol=1e-4, atol=1e-5)


def test_some_microbatches_use_what_others_do_not() -> None:
    firsts = [samples_at(4 * place, 4 * place + 1, of=SAMPLES)[0] % 2 for place in range(8 * STEPS)]
    assert all(0 < sum(firsts[8 * step : 8 * step + 8]) < 8 for step in range(STEPS))


class Augmented(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Every look at a sample draws from all three generators."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.rand(6) + random.random() + float(np.random.random())
        return torch.tensor(index), torch.full((6,), index / 40) + noise, torch.ones(3)


def mixed(samples: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    order = torch.randperm(len(samples))
    return [torch.stack(column)[order] for column in zip(*samples, strict=True)]


def train_augmented(run_dir: str, workers: int) -> tuple[str, float, float]:
    given = recipe(
        data=Augmented(),
        collate=mixed,
        loss=squared_error,
        steps=6,
        evaluation=ls.Evaluation(data=Augmented()),
    )
    result = ls.train(given, plan=f"numerics=bitwise,workers={workers}", run_dir=run_dir)
    return result.fingerprint, result.loss, result.metrics["loss"]


def test_augmentation_depends_neither_on_ranks_nor_on_loader_workers(
    pool: WorkerPool, tmp_path: Path
) -> None:
    found = [
        (size, workers, result)
        for size, counts in ((1, [0, 1]), (2, [0, 3]))
        for ranks in pool.run(
            size,
            each_of,
            train_augmented,
            str(tmp_path / str(size)),
            [(count,) for count in counts],
        )
        for workers, result in zip(counts, ranks, strict=True)
    ]
    assert [each for each in found if each[2] != found[0][2]] == []


def train_in_two_phases(run_dir: str) -> tuple[str, list[int]]:
    """With more microbatches a step in the second one."""
    with ls.Session(run_dir=run_dir, plan="numerics=bitwise") as session:
        model, optimizer = session.prepare(Everything, foreach_adamw)
        counts = []
        for global_batch in (8, 20, 4):
            for step in session.steps(tokens(), global_batch=global_batch, microbatch=4, steps=2):
                for batch in step.microbatches():
                    step.backward(loss(model, batch))
                step.commit(optimizer, clip_norm=1.0)
                counts.append(step.count)
    return ls.fingerprint(model), counts


def train_with_seed(run_dir: str, seed: int) -> str:
    given = everything(optimizer=foreach_adamw, seed=seed, steps=1)
    return ls.train(given, run_dir=run_dir, plan="numerics=bitwise").fingerprint


def in_phases_and_with_seeds(run_dir: str, seeds: Sequence[int]) -> tuple[Any, list[str]]:
    return train_in_two_phases(f"{run_dir}/phases"), each_of(
        train_with_seed, run_dir, [(seed,) for seed in seeds], may_refuse=False
    )


def test_phases_of_other_batches_and_seeds_have_the_same_bits_at_any_world_size(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """And a run depends on its seed, and on no run before it."""
    found = [
        result
        for size in (1, 2, 3)
        for result in pool.run(
            size, in_phases_and_with_seeds, str(tmp_path / str(size)), [0, 1, 0, 2**63 - 1]
        )
    ]
    assert found == [found[0]] * 6
    (_, counts), fingerprints = found[0]
    assert counts == [2, 2, 5, 5, 1, 1]
    assert fingerprints[0] == fingerprints[2]
    assert len(set(fingerprints)) == 3
