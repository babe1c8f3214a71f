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
from training.subjects import DATA_PLANS, recipe, same, samples_at, squared_error, state_of

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
    """Dropout, BatchNorm, tied weights, and parts that some microbatches, one step or no step at
    all uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.hidden = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.once = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor, token: Tensor) -> Tensor:
        x = torch.tanh(self.hidden(self.dropout(self.norm(self.embedding(token)))))
        if index[0] % 2:
            x = x + self.sometimes(x)
        if bool((index == SEEN_ONCE).any()):
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


def everything(optimizer: Callable[[nn.Module], Any], **changes: Any) -> ls.Recipe:
    given: dict[str, Any] = {
        "global_batch": 32,
        "microbatch": 4,
        "clip_norm": 0.5,
        "steps": STEPS,
        "loss": loss,
        **changes,
    }
    return recipe(model=Everything, data=tokens(), optimizer=optimizer, **given)


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


CASES: dict[str, Callable[[], ls.Recipe]] = {
    "AdamW (foreach), 8 microbatches": lambda: everything(foreach_adamw),
    "AdamW (foreach), 7 microbatches": lambda: everything(foreach_adamw, global_batch=28),
    "AdamW (fused), 8 microbatches": lambda: everything(fused_adamw),
    "AdamW (fused), 7 microbatches, the last one short": lambda: everything(
        fused_adamw, global_batch=27
    ),
    "momentum SGD, 8 microbatches": lambda: everything(momentum),
    "epochs with a short last batch of 1 microbatch": lambda: everything(
        foreach_adamw, steps=None, epochs=1
    ),
    "one microbatch": lambda: everything(foreach_adamw, global_batch=4),
    "weights from the forward": lambda: everything(foreach_adamw, loss=weighted_loss),
    "two terms": lambda: everything(foreach_adamw, loss=two_terms, weight=count),
    "two terms, one microbatch": lambda: everything(
        foreach_adamw, loss=two_terms, weight=count, global_batch=4
    ),
    "weights from the forward, one microbatch": lambda: everything(
        foreach_adamw, loss=weighted_loss, global_batch=4
    ),
    "a loss in float64": lambda: everything(foreach_adamw, loss=loss_in_float64),
    "parameters in float32 and float64": lambda: recipe(
        model=in_two_dtypes, loss=squared_error, global_batch=28
    ),
    "parameters that are not contiguous": lambda: recipe(
        model=LaidOutOtherwise,
        loss=squared_error,
        optimizer=momentum,
        global_batch=28,
        clip_norm=0.1,
    ),
    "bf16": lambda: everything(foreach_adamw, precision="bf16"),
    "fp16": lambda: everything(foreach_adamw, precision="fp16"),
}
USES_EVERYTHING = [name for name in CASES if "8 microbatches" in name]
COMPARED = ["momentum SGD, 8 microbatches", "parameters that are not contiguous"]


SOME = [
    *USES_EVERYTHING,
    "AdamW (fused), 7 microbatches, the last one short",
    "weights from the forward, one microbatch",
]
UNSHARDED = ("parameters in float32 and float64", "parameters that are not contiguous")
"""FSDP2 wants one dtype in a group of parameters, and contiguous ones."""


def cases(plan: str) -> list[str]:
    """All for a few plans, the telling ones for the others."""
    names = (
        CASES
        if plan in ("replicate=1", "replicate=2", "replicate=3", "shard=2", "shard=3")
        else SOME
    )
    return [name for name in names if "shard" not in plan or name not in UNSHARDED]


def tier_of(plan: str, name: str) -> Any:
    """The telling cases run with every change, and all others for one plan of each axis."""
    if name not in SOME and plan not in ("replicate=3", "shard=2"):
        return pytest.mark.slow
    return () if plan in TELLING else pytest.mark.slow


class Weights(ls.Hook):
    """How the model stood before the first step and after each."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_start(self, run: Any) -> None:
        self.states.append(state_of(run.model))

    after_step = on_start


def train_all_cases(run_dir: str, plan: str, names: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        weights = Weights()
        result = ls.train(CASES[name](), plan=plan, run_dir=f"{run_dir}/{name}", hooks=[weights])
        found[name] = (result.fingerprint, result.loss, weights.states)
    return found


@pytest.fixture(scope="module")
def trained(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    @cache
    def run(plan: str, numerics: str, telling: bool) -> list[Any]:
        names = (
            cases(plan)
            if numerics == "bitwise"
            else [name for name in cases(plan) if name in {*USES_EVERYTHING, *COMPARED}]
        )
        names = [name for name in names if (name in SOME) == telling]
        return pool.run(
            PLANS[plan],
            train_all_cases,
            str(tmp_path_factory.mktemp("runs")),
            f"{plan},numerics={numerics}",
            names,
        )

    return lambda plan, numerics, name: [
        result[name] for result in run(plan, numerics, name in SOME)
    ]


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        pytest.param(plan, name, marks=tier_of(plan, name))
        for plan in PLANS
        if plan != ALONE
        for name in cases(plan)
    ],
)
def test_the_fingerprint_and_the_loss_are_those_of_one_process(
    trained: Callable[..., list[Any]], plan: str, name: str
) -> None:
    ((fingerprint, loss, _),) = trained(ALONE, "bitwise", name)
    for rank, result in enumerate(trained(plan, "bitwise", name)):
        assert result[:2] == (fingerprint, loss), f"rank {rank}"


def test_the_cases_have_fingerprints_of_their_own(trained: Callable[..., list[Any]]) -> None:
    assert len({trained(ALONE, "bitwise", name)[0][0] for name in CASES}) >= len(CASES) - 1


@pytest.mark.parametrize("numerics", ["fast", "bitwise"])
@pytest.mark.parametrize("plan", tiered(PLANS, always=TELLING, most=1))
@pytest.mark.parametrize("name", USES_EVERYTHING)
def test_a_parameter_moves_in_exactly_the_steps_that_use_it(
    trained: Callable[..., list[Any]], plan: str, numerics: str, name: str
) -> None:
    for rank, (_, _, states) in enumerate(trained(plan, numerics, name)):
        steps = list(pairwise(states))
        moved = {
            part: [not same(before[part], after[part]) for before, after in steps]
            for part in states[0]
        }
        for part in ("weight", "bias"):
            assert moved[f"never.{part}"] == [False, False, False], f"rank {rank}"
            assert moved[f"once.{part}"] == [False, True, False], f"rank {rank}"
            assert moved[f"sometimes.{part}"] == moved[f"hidden.{part}"] == [True, True, True], (
                f"rank {rank}"
            )
        assert same(states[-1]["head.weight"], states[-1]["embedding.weight"])


@pytest.mark.parametrize("plan", tiered(PLANS, always=TELLING, most=1))
def test_fast_and_bitwise_differ_by_rounding_only(
    trained: Callable[..., list[Any]], plan: str
) -> None:
    for name in COMPARED:
        if name not in cases(plan):
            continue
        fast = trained(plan, "fast", name)[0][2][-1]
        for part, value in trained(ALONE, "bitwise", name)[0][2][-1].items():
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


@pytest.mark.parametrize(("world_size", "workers"), [(1, 1), (2, 0), (2, 3)])
def test_augmentation_depends_neither_on_ranks_nor_on_loader_workers(
    pool: WorkerPool, tmp_path: Path, world_size: int, workers: int
) -> None:
    (alone,) = pool.run(1, train_augmented, str(tmp_path / "alone"), 0)
    assert (
        pool.run(world_size, train_augmented, str(tmp_path / "run"), workers)
        == [alone] * world_size
    )


def train_with_seeds(run_dir: str, seeds: Sequence[int]) -> list[str]:
    given = [everything(foreach_adamw, seed=seed) for seed in seeds]
    return [
        ls.train(each, run_dir=f"{run_dir}/{number}", plan="numerics=bitwise").fingerprint
        for number, each in enumerate(given)
    ]


def test_a_run_depends_on_its_seed_and_on_no_run_before_it(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for fingerprints in pool.run(2, train_with_seeds, str(tmp_path), [0, 1, 0, 2**63 - 1]):
        assert fingerprints[0] == fingerprints[2]
        assert len(set(fingerprints)) == 3


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


def test_phases_with_batches_of_other_sizes_have_the_same_bits_too(
    pool: WorkerPool, tmp_path: Path
) -> None:
    found = [
        result
        for size in (1, 2, 3)
        for result in pool.run(size, train_in_two_phases, str(tmp_path / str(size)))
    ]
    assert found == [found[0]] * 6
    assert found[0][1] == [2, 2, 5, 5, 1, 1]
