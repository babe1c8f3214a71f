"""numerics=bitwise with sequences: each chunk is computed by itself, so a training has the same
bits on any number of processes of `context`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model.context.models import GPT, WORDS
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training.subjects import Fails, each_of, learned
from training.test_context_axis import recipe
from training.texts import weighted

import lockstep as ls
from lockstep.base.errors import DataError, RecipeError
from lockstep.testing.pool import WorkerPool

ALONE = "replicate=1,numerics=bitwise"
PLANS = {
    2: (
        "context=2,numerics=bitwise",
        "context=2,numerics=bitwise,checkpointing=full",
        "replicate=2,numerics=bitwise",
        "shard=2,numerics=bitwise",
    ),
    3: ("context=3,numerics=bitwise,checkpointing=selective",),
    4: (
        "context=4,numerics=bitwise",
        "replicate=2,context=2,numerics=bitwise",
        "shard=2,context=2,numerics=bitwise,checkpointing=full",
        "replicate=2,shard=2,numerics=bitwise",
    ),
}
"""Number of processes -> plans."""


def shifting(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    pairs = output[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()
    return ls.Sum(F.cross_entropy(*pairs, reduction="sum"))


def words(samples: int, tokens: int) -> Tensor:
    return torch.randint(WORDS, (samples, tokens), generator=torch.Generator().manual_seed(1))


def documents() -> TensorDataset:
    """Words, the words that follow them in their documents, and the documents."""
    text = words(12, 40)
    chance = torch.rand(text.shape, generator=torch.Generator().manual_seed(3))
    ids = (chance < 0.1).long().cumsum(1)
    following = text[:, 1:].masked_fill(ids.diff(dim=1) != 0, -100)
    return TensorDataset(text, F.pad(following, (0, 1), value=-100), ids)


SINGLE = {
    "model": lambda: GPT("slice", "noise", attention_dropout=0.1),
    "data": TensorDataset(words(16, 37)),
    "loss": shifting,
    "weight": lambda batch: batch[0][:, 1:].numel(),
    "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "evaluation": ls.Evaluation(data=TensorDataset(words(5, 30))),
    "global_batch": 5,
    "microbatch": 1,
    "steps": 2,
}
RECIPES: list[dict[str, Any]] = [
    {"stages": ["words", "places", "blocks.*", "head"]},
    SINGLE,
    {
        **SINGLE,
        "model": lambda: GPT(causal=False),
        "data": documents(),
        "loss": weighted,
        "weight": None,
        "evaluation": None,
        "sequence": ls.Sequence(chunks=8, documents=lambda batch: batch[2]),
        "global_batch": 8,
        "microbatch": 3,
    },
    {**SINGLE, "data": TensorDataset(words(16, 5)), "precision": "bf16", "evaluation": None},
]
"""Tied weights, several terms, metrics, and parts with streams of their own, in float64; 5
microbatches in float32, with dropout of attention, noise, and a loss that shifts its labels;
documents, with a weight that the forward computes; fewer tokens than chunks, in bf16."""

Trained = tuple[str | None, list[float]]


def train(run_dir: str, plan: str, **changes: Any) -> Trained:
    """Return the fingerprint, and the numbers of the result."""
    result = ls.train(recipe(**changes), plan=plan, run_dir=run_dir, log_every=1)
    return result.fingerprint, [result.loss, *result.metrics.values()]


def recipes_of(plan: str, whole: bool) -> list[int]:
    """Numbers of `RECIPES`: all of them, or that of several terms or of documents."""
    if whole or plan == PLANS[2][0]:
        return [*range(len(RECIPES))]
    return [0] if "replicate" in plan else [2]


def train_all(run_dir: str, plan: str, whole: bool) -> list[Trained]:
    return [
        train(f"{run_dir}/{number}", plan, **RECIPES[number]) for number in recipes_of(plan, whole)
    ]


def train_each(run_dir: str, plans: Sequence[str], whole: bool) -> list[list[Trained]]:
    return each_of(train_all, run_dir, [(plan, whole) for plan in plans], may_refuse=False)


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The models of the recipes, and what their trainings log."""
    folder = tmp_path_factory.mktemp("alone")
    (found,) = pool.run(1, train_all, str(folder), ALONE, True, timeout_seconds=60)
    return found, [learned(folder / str(number)) for number in range(len(RECIPES))]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("size", "whole"),
    [(2, False), *(pytest.param(size, True, marks=pytest.mark.slow) for size in PLANS)],
)
def test_a_training_has_the_same_bits_on_any_number_of_processes(
    pool: WorkerPool, tmp_path: Path, alone: Any, size: int, whole: bool
) -> None:
    ranks = pool.run(size, train_each, str(tmp_path), PLANS[size], whole, timeout_seconds=140)
    for place, plan in enumerate(PLANS[size]):
        recipes = recipes_of(plan, whole)
        expected = [[of_one[number] for number in recipes] for of_one in alone]
        numbers = [learned(tmp_path / str(place) / str(number)) for number in recipes]
        for rank in ranks:
            assert [rank[place], numbers] == expected, plan


def begin(run_dir: str, plan: str) -> str:
    """Train the first recipe until it fails, after a checkpoint."""
    given: Any = {"plan": plan, "run_dir": run_dir, "hooks": [Fails()], "log_every": 1}
    with pytest.raises(DataError, match="a step too far") as raised:
        ls.train(recipe(**RECIPES[0]), saving=ls.Saving(every=2), **given)
    return str(raised.value)


def go_on(run_dir: str, plan: str) -> Trained:
    return train(run_dir, plan, **RECIPES[0])


@pytest.mark.timeout(150)
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_the_same_bits_under_another_plan(
    pool: WorkerPool, tmp_path: Path, alone: Any, ranks: int
) -> None:
    plans = {1: ALONE, 2: PLANS[2][0]}
    pool.run(ranks, begin, str(tmp_path), plans[ranks])
    for found in pool.run(3 - ranks, go_on, str(tmp_path), plans[3 - ranks]):
        assert found == alone[0][0]


class Broken(GPT):
    """Fails for the chunk that has the last word of the text."""

    def forward(self, text: Tensor) -> Tensor:
        if bool((text == WORDS - 1).any()):
            raise ValueError("a word that is not known")
        return super().forward(text)


def fail_in_a_chunk(run_dir: str) -> tuple[str, list[str]]:
    """Return what is said, and the threads that are left."""
    text = words(8, 37).clamp(max=WORDS - 2)
    text[5, 20] = WORDS - 1
    changes: Any = {**SINGLE, "model": Broken, "data": TensorDataset(text), "evaluation": None}
    with pytest.raises(ValueError, match="not known") as raised:
        train(run_dir, ALONE, **changes)
    return str(raised.value), [each.name for each in threading.enumerate() if "chunk" in each.name]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": lambda: GPT(extra="convolution")}, "(conv1d) computes a convolution over tokens"),
    ({"model": lambda: GPT(extra="mean")}, "or leave numerics=bitwise out"),
    ({"model": lambda: GPT(extra="batch norm")}, "numerics=bitwise cuts sequences"),
    (
        {"loss": lambda output, batch: ls.Sum(output.mean())},
        "under numerics=bitwise it is computed",
    ),
]


def train_changed(run_dir: str, changes: dict[str, Any]) -> Trained:
    return train(run_dir, ALONE, **{**SINGLE, "evaluation": None, **changes})


def refusals(run_dir: str) -> tuple[list[Any], tuple[str, list[str]]]:
    said = each_of(train_changed, f"{run_dir}/refused", [(changes,) for changes, _ in REFUSED])
    return said, fail_in_a_chunk(f"{run_dir}/broken")


@pytest.mark.timeout(150)
def test_what_cannot_be_computed_by_chunks_is_refused_and_an_error_of_a_chunk_is_raised_once(
    pool: WorkerPool, tmp_path: Path
) -> None:
    ((said, broken),) = pool.run(1, refusals, str(tmp_path))
    assert broken == ("a word that is not known", [])
    for (_, expected), found in zip(REFUSED, said, strict=True):
        assert expected in str(found)


def llama() -> torch.nn.Module:
    from model.context.families import family

    return family("llama", tie_word_embeddings=True, attention_dropout=0.1)


def train_llama(run_dir: str, plan: str) -> Trained:
    changes: dict[str, Any] = {
        "model": llama,
        "inputs": lambda batch: {"input_ids": batch[0]},
        "loss": lambda output, batch: shifting(output.logits, batch),
    }
    return train(run_dir, plan, **{**SINGLE, **changes})


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_so_has_a_model_of_transformers_with_dropout_of_attention(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (alone,) = pool.run(1, train_llama, str(tmp_path / "alone"), ALONE)
    plan = "context=2,numerics=bitwise,checkpointing=full"
    assert pool.run(2, train_llama, str(tmp_path / "both"), plan) == [alone] * 2


class Renormed(GPT):
    """Its forward changes the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words.max_norm = 0.1


def train_renormed(folder: str, plan: str) -> str:
    try:
        return str(train(folder, plan, model=Renormed)[0])
    except RecipeError as error:
        return str(error)


def test_a_forward_that_changes_gathered_parameters_is_refused(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for said in pool.run(2, train_renormed, str(tmp_path), "shard=2,numerics=bitwise"):
        assert "the model's forward changed its parameter 'words.weight'" in said
