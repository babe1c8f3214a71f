"""Experts on several ranks with bitwise numerics: one fingerprint at any number of processes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model.expert.models import Counted, StackedExperts
from torch import Tensor, nn
from training import test_balance as balanced
from training.subjects import Fails, adamw, each_of
from training.test_expert_axis import WORDS, Block, Generator, recipe
from training.texts import entropy, first

import lockstep as ls
from lockstep.base.errors import DataError
from lockstep.testing.pool import WorkerPool

ALONE = "replicate=1"
CASES: dict[int, list[tuple[str, tuple[str, ...]]]] = {
    2: [
        ("expert=2", ("uneven", "balanced", "transformers")),
        ("expert=2,checkpointing=full", ("own", "chunks")),
        ("shard=2", ("balanced", "chunks")),
        ("context=2", ("chunks",)),
    ],
    4: [
        ("shard=2,expert=2", ("uneven",)),
        ("shard=2,expert=2,checkpointing=full", ("own",)),
        ("expert=2,context=2", ("chunks",)),
    ],
}
"""Number of processes -> plans and names of `RECIPES`. The tests below train "own" under expert=2
and shard=2, and "chunks" under expert=2 and replicate=2."""
SLOW: dict[int, list[tuple[str, tuple[str, ...]]]] = {
    2: [("replicate=2", ("own",)), ("shard=2", ("uneven",))],
    4: [
        ("shard=2,context=2", ("chunks",)),
        ("expert=4", ("own", "chunks", "transformers")),
        ("replicate=2,expert=2", ("own", "uneven", "balanced", "chunks")),
        ("replicate=2,shard=2", ("own", "balanced", "chunks")),
        ("shard=2,expert=2", ("balanced", "chunks", "transformers")),
        ("shard=2,expert=2,sharding=gradients", ("own", "balanced")),
        ("shard=2,expert=2,checkpointing=selective", ("own", "uneven", "transformers")),
        ("expert=2,context=2,checkpointing=full", ("chunks",)),
        ("replicate=2,context=2,checkpointing=selective", ("chunks",)),
    ],
}


class Unnamed(Block):
    """With experts that read their number from an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Counted()


class Six(Block):
    """With six experts, three on each of two ranks: two and one on the ranks of `shard`."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(self.router.in_features, 6, bias=False)
        self.experts = StackedExperts(6)


def qwen() -> nn.Module:
    from model.expert.families import family

    return family("qwen3-moe")


def words(batch: Sequence[Tensor]) -> dict[str, Any]:
    return {"input_ids": batch[0]}


def entropy_of_logits(output: Any, batch: Sequence[Tensor]) -> ls.Sum:
    return entropy(output.logits, batch)


def small(**changes: Any) -> ls.Recipe:
    """Steps of three microbatches, with dropout and clipping."""
    given: dict[str, Any] = {
        "model": lambda: Generator(Unnamed).float(),
        "evaluation": None,
        "sequence": None,
        "steps": 2,
        "optimizer": adamw,
        "inputs": first,
        **changes,
    }
    return recipe(**given)


RECIPES: dict[str, ls.Recipe] = {
    "own": small(),
    "uneven": small(
        model=lambda: Generator(Six).float(), global_batch=8, microbatch=1, precision="bf16"
    ),
    "balanced": balanced.recipe(steps=3, optimizer=adamw, clip_norm=0.1, microbatch=3),
    "chunks": small(sequence=ls.Sequence(chunks=4)),
    "transformers": small(model=qwen, inputs=words, loss=entropy_of_logits),
}


def fingerprint(folder: str, plan: str, name: str) -> tuple[str, list[Any]]:
    """The fingerprint, and the modules that compute one expert after another."""
    made = ls.train(RECIPES[name], plan=f"{plan},numerics=bitwise", run_dir=folder)
    eager = [each.details["modules"] for each in made.events if each.name == "experts-eager"]
    return made.fingerprint, eager


def fingerprints(folder: str, cases: Sequence[tuple[str, str]]) -> list[Any]:
    return each_of(fingerprint, folder, cases, may_refuse=False)


@pytest.fixture(scope="module")
def alone(
    pool: WorkerPool, transformers_in_pool: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one process trains."""
    cases = [(ALONE, name) for name in RECIPES]
    (found,) = pool.run(1, fingerprints, str(tmp_path_factory.mktemp("alone")), cases)
    return dict(zip(RECIPES, found, strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cases", [CASES, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_one_fingerprint(
    pool: WorkerPool, tmp_path: Path, alone: dict[str, Any], cases: Any
) -> None:
    for size in cases:
        pairs = [(plan, name) for plan, names in cases[size] for name in names]
        folder = str(tmp_path / str(size))
        for rank in pool.run(size, fingerprints, folder, pairs, timeout_seconds=280):
            assert [(pair, each) for pair, each in zip(pairs, rank, strict=True)] == [
                ((plan, name), alone[name]) for plan, name in pairs
            ]
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    for name, (_, eager) in alone.items():
        assert eager == ([layers] if name == "transformers" else [])


def begin(folder: str, plan: str) -> str:
    """Train until it fails after a checkpoint."""
    given: dict[str, Any] = {"plan": f"{plan},numerics=bitwise", "run_dir": folder}
    with pytest.raises(DataError, match="a step too far") as raised:
        ls.train(small(steps=4), saving=ls.Saving(every=2), hooks=[Fails()], **given)
    return str(raised.value)


def go_on(folder: str, plan: str) -> tuple[str, float | None]:
    result = ls.train(small(steps=4), plan=f"{plan},numerics=bitwise", run_dir=folder)
    return result.fingerprint, result.loss


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["expert=2", "expert=2"], ["shard=2", ALONE]),
        pytest.param(
            ["shard=2,expert=2", "shard=2,expert=2", "shard=2", "replicate=2"],
            ["expert=4", ALONE, "shard=2,expert=2", "shard=2,expert=2"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_on_under_another_plan(
    pool: WorkerPool, tmp_path: Path, before: list[str], after: list[str]
) -> None:
    (expected,) = pool.run(1, go_on, str(tmp_path / "undisturbed"), ALONE)
    for number, (first_plan, second_plan) in enumerate(zip(before, after, strict=True)):
        folder = str(tmp_path / str(number))
        said = pool.run(processes(first_plan), begin, folder, first_plan)
        assert set(said) == {"a step too far"}
        for found in pool.run(processes(second_plan), go_on, folder, second_plan):
            assert found == expected, (first_plan, second_plan)


def processes(plan: str) -> int:
    return math.prod(int(size) for size in re.findall(r"=(\d)", plan))


SHORT, LONG = 3, 6


class Texts(torch.utils.data.Dataset[list[Tensor]]):
    """Texts of `SHORT` and `LONG` words in turn."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> list[Tensor]:
        text = torch.arange(place, place + (SHORT, LONG)[place % 2]) % WORDS
        return [text, text.roll(1)]


def short(chunks: int) -> ls.Recipe:
    """With fewer words than chunks in some microbatches."""
    return small(
        data=Texts(), microbatch=1, global_batch=8, steps=1, sequence=ls.Sequence(chunks=chunks)
    )


def train_short(folder: str, plan: str, chunks: int) -> str:
    return ls.train(short(chunks), plan=f"{plan},numerics=bitwise", run_dir=folder).fingerprint


def train_each_short(folder: str, cases: Any) -> list[str]:
    return each_of(train_short, folder, cases)


def test_ranks_whose_sequences_have_other_numbers_of_chunks_are_refused(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """And what the error recommends trains the model of one process."""
    cases = [("replicate=2", 4), ("expert=2", SHORT), ("expert=2", 4)]
    (expected,) = pool.run(
        1, train_each_short, str(tmp_path / "alone"), [(ALONE, 4), (ALONE, SHORT)]
    )
    for *right, said in pool.run(2, train_each_short, str(tmp_path), cases):
        assert right == expected
        assert f"in {SHORT} chunks" in said
        assert (
            f"give sequences of at least 4 tokens, ls.Sequence(chunks={SHORT}), or use replicate"
            " or shard instead of expert" in said
        )
