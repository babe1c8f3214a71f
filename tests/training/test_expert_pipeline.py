"""Experts in a pipeline: the ranks of `expert` in a stage send each other tokens. They train the
model of one process: to rounding, or with bitwise numerics to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model.expert.models import MixesRows
from torch import Tensor, nn
from torch.nn import functional as F
from training.subjects import Fails, FullState, Trained, each_of, learned, off
from training.test_expert_axis import WIDTH, WORDS, Block, texts
from training.texts import cropped, entropy, is_right

import lockstep as ls
from lockstep.base.errors import DataError, UserError
from lockstep.testing.pool import WorkerPool

STAGES = ["embedding", "blocks.*", "head"]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1)

    def forward(self, text: Tensor) -> Tensor:
        return self.dropout(self.words(text))  # type: ignore[no-any-return]


class Dense(nn.Module):
    """A block without experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40 * WIDTH), nn.Linear(40 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Tied to the words."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Generator(nn.Module):
    """(samples, tokens) words -> logits. Float64, in stages."""

    def __init__(self, *blocks: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(block() for block in blocks)
        self.head = Head(self.embedding.words.weight)
        self.double()

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def mixed() -> nn.Module:
    """Experts in both halves, and a quarter without."""
    return Generator(Block, Dense, Block, Block)


def half_dense() -> nn.Module:
    """Experts in the first of two stages."""
    return Generator(Block, Block, Dense, Dense)


def recipe(**changes: Any) -> ls.Recipe:
    """Steps of seven, seven and three microbatches: one rank of two computes a dummy in each."""
    given: dict[str, Any] = {
        "model": mixed,
        "stages": STAGES,
        "data": texts(34),
        "collate": cropped,
        "inputs": lambda batch: batch[0],
        "loss": entropy,
        "weight": lambda batch: (batch[1] != -100).sum(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "clip_norm": 0.5,
        "global_batch": 14,
        "microbatch": 2,
        "epochs": 1,
        "sequence": ls.Sequence(chunks=4),
        "evaluation": ls.Evaluation(
            data=texts(5, seed=9), every=2, metrics={"right": ls.Mean(is_right)}
        ),
        **changes,
    }
    return ls.Recipe(**given)


def train(run_dir: str, plan: str, changes: dict[str, Any]) -> Trained:
    """Return the model, the loss and the metrics."""
    held = FullState()
    result = ls.train(recipe(**changes), plan=plan, run_dir=run_dir, hooks=[held])
    return held.state, [result.loss, *result.metrics.values()]


def train_each(folder: str, cases: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    return each_of(train, folder, cases)


HALF: dict[str, Any] = {"model": half_dense, "experts": ["blocks.*.experts"]}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("pipeline=2,expert=2,schedule=zero-bubble", HALF),
    ("pipeline=2,expert=2,schedule=gpipe,checkpointing=full", {}),
    ("pipeline=2,expert=2,schedule=interleaved,checkpointing=selective", {}),
]
"""Plans of four processes, and changes of the recipe. For 1f1b see `BITWISE`."""


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Trained]:
    """The models of one process: with experts in both halves, and in the first."""
    cases: list[tuple[str, dict[str, Any]]] = [("replicate=1", {}), ("replicate=1", HALF)]
    ((whole, half),) = pool.run(1, train_each, str(tmp_path_factory.mktemp("alone")), cases)
    return whole, half


@pytest.mark.timeout(120)
def test_stages_with_experts_train_the_model_of_one_process(
    pool: WorkerPool, tmp_path: Path, alone: tuple[Trained, Trained]
) -> None:
    for rank in pool.run(4, train_each, str(tmp_path), CASES, timeout_seconds=110):
        for (plan, changes), found in zip(CASES, rank, strict=True):
            assert not isinstance(found, str), (plan, found)
            assert off(found, alone[changes is HALF]) < 1e-14, plan


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_sharded_stages_with_experts_recompute_all(
    pool: WorkerPool, tmp_path: Path, alone: tuple[Trained, Trained]
) -> None:
    plan = "shard=2,pipeline=2,expert=2,checkpointing="
    cases: list[tuple[str, dict[str, Any]]] = [(f"{plan}selective", {}), (f"{plan}full", {})]
    with WorkerPool(8) as larger:
        for refused, found in larger.run(8, train_each, str(tmp_path), cases, timeout_seconds=140):
            assert refused.endswith("recomputes only what is alike; choose checkpointing=full")
            assert off(found, alone[0]) < 1e-14


def begin(run_dir: str, plan: str) -> str:
    """Train until it fails after a checkpoint."""
    try:
        given = {"plan": plan, "run_dir": run_dir, "hooks": [Fails()]}
        return ls.train(recipe(), saving=ls.Saving(every=2), **given).plan  # type: ignore[arg-type]
    except DataError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_goes_on_under_another_plan(
    pool: WorkerPool, tmp_path: Path, alone: tuple[Trained, Trained]
) -> None:
    staged = ("pipeline=2,expert=2,schedule=interleaved", 4), ("pipeline=2,expert=2", 4)
    single = ("replicate=1", 1), ("expert=2", 2)
    for number, ((first, size), (second, other)) in enumerate(
        [*zip(staged, single, strict=True), *zip(single, staged, strict=True)]
    ):
        folder = str(tmp_path / str(number))
        assert set(pool.run(size, begin, folder, first)) == {"a step too far"}
        for found in pool.run(other, train, folder, second, {}):
            assert off(found, alone[0]) < 1e-14, (first, second)


BITS: dict[str, dict[str, Any]] = {
    "rows": {"sequence": None},
    "chunks": {"sequence": ls.Sequence(chunks=2)},
    "bf16": HALF | {"model": lambda: half_dense().float(), "precision": "bf16", "sequence": None},
}
BITWISE = {
    4: [
        ("pipeline=2,expert=2", "rows"),
        ("pipeline=2,expert=2,schedule=zero-bubble,checkpointing=full", "chunks"),
    ],
}
MORE_BITWISE = {
    2: [("expert=2", "chunks"), ("pipeline=2", "bf16")],
    4: [
        ("pipeline=2,expert=2,schedule=zero-bubble", "rows"),
        ("pipeline=2,expert=2,schedule=interleaved,checkpointing=selective", "rows"),
        ("pipeline=2,expert=2,schedule=gpipe", "chunks"),
        ("pipeline=2,expert=2,checkpointing=full", "bf16"),
    ],
}
Bits = tuple[str | None, list[float]]


def train_bits(run_dir: str, plan: str, name: str) -> Bits:
    """Return the fingerprint, and the numbers of the result."""
    plan = f"{plan},numerics=bitwise"
    result = ls.train(recipe(**BITS[name]), plan=plan, run_dir=run_dir, log_every=1)
    return result.fingerprint, [result.loss, *result.metrics.values()]


def train_all_bits(folder: str, cases: Sequence[tuple[str, str]]) -> list[Bits]:
    return each_of(train_bits, folder, cases, may_refuse=False)


@pytest.fixture(scope="module")
def bits(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Returns for a recipe the result of one process, and what it logs."""

    @cache
    def alone(name: str) -> Any:
        folder = tmp_path_factory.mktemp("bits")
        (found,) = pool.run(1, train_bits, str(folder), "replicate=1", name)
        return found, learned(folder)

    return alone


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("size", "cases"),
    [
        *BITWISE.items(),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE_BITWISE.items()),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_stages_with_experts_have_the_bits_of_one_process(
    pool: WorkerPool,
    tmp_path: Path,
    bits: Callable[[str], Any],
    size: int,
    cases: Sequence[tuple[str, str]],
) -> None:
    ranks = pool.run(size, train_all_bits, str(tmp_path), cases, timeout_seconds=140)
    for number, (plan, name) in enumerate(cases):
        for found in ranks:
            assert (found[number], learned(tmp_path / str(number))) == bits(name), (plan, name)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_sharded_stages_with_experts_have_the_bits_of_one_process(
    tmp_path: Path, bits: Callable[[str], Any]
) -> None:
    """An evaluation between two steps leaves the experts' tensors as they are."""
    plan = "shard=2,pipeline=2,expert=2"
    cases = [(plan, "rows"), (f"{plan},schedule=zero-bubble", "rows")]
    with WorkerPool(8) as larger:
        ranks = larger.run(8, train_all_bits, str(tmp_path), cases, timeout_seconds=140)
    for number, (plan, name) in enumerate(cases):
        for found in ranks:
            assert (found[number], learned(tmp_path / str(number))) == bits(name), plan


class Mixing(Block):
    """Its experts take a mean over their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = MixesRows()


class LeftOut(Block):
    """Leaves its experts out on some ranks, as stochastic depth does."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.qkv(x)[..., :WIDTH] if dist.get_rank() % 2 else super().forward(x)


def mixing_first() -> nn.Module:
    return Generator(Mixing, Dense, Block)


def mixing_last() -> nn.Module:
    return Generator(Block, Dense, Mixing)


def left_out() -> nn.Module:
    return Generator(Block, Dense, LeftOut)


def dense() -> nn.Module:
    return Generator(Dense, Dense, Dense)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": mixing_first}, "RecipeError: blocks.0.experts computes something else when"),
    ({"model": mixing_last}, "RecipeError: blocks.2.experts computes something else when"),
    ({"model": left_out}, "leaves out blocks.2.experts, as with stochastic depth;"),
    ({"model": dense}, "PlanError: expert=2, but the model has no modules of experts"),
    ({"experts": ["head"]}, "PlanError: expert=2, and head has 11 experts; each rank must hold"),
]
"""Changes of the recipe, and words of the error."""


def refuse(folder: str, plan: str) -> list[Any]:
    found = []
    for number, (changes, _) in enumerate(REFUSED):
        try:
            train(f"{folder}/{number}", plan, changes)
            found.append("it trained")
        except UserError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_what_a_stage_cannot_divide_is_refused_on_all_ranks(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for rank in pool.run(4, refuse, str(tmp_path), "pipeline=2,expert=2"):
        for said, (changes, words) in zip(rank, REFUSED, strict=True):
            assert words in said, (changes, said)


class SharedExperts(Generator):
    """Its first and last block have one module of experts."""

    def __init__(self) -> None:
        super().__init__(Block, Dense, Block)
        first, _, last = self.blocks
        last.experts = first.experts


def shared_by_parts(folder: str, plans: Sequence[str]) -> list[Any]:
    found: list[Any] = []
    for plan, stages in [(each, stages) for each in plans for stages in (STAGES, None)]:
        try:
            result = ls.train(
                recipe(**BITS["rows"] | {"model": SharedExperts, "stages": stages, "epochs": 1}),
                plan=f"{plan},numerics=bitwise",
                run_dir=f"{folder}/{len(found)}-{plan}",
            )
            found.append(result.fingerprint)
        except UserError as error:
            found.append(str(error))
    return found


def test_divided_experts_that_parts_share_are_refused_in_bitwise_numerics(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """What the error recommends has the bits of one process: no parts, or replicate."""
    (alone,) = pool.run(1, shared_by_parts, str(tmp_path), ["replicate=1"])
    for refused, without_parts, *replicas in pool.run(
        2, shared_by_parts, str(tmp_path), ["expert=2", "replicate=2"]
    ):
        assert "several parts of the model have blocks.0.experts" in refused
        assert without_parts == alone[1]
        assert replicas == alone
