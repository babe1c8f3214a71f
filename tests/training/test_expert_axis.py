"""The axis `expert` under `ls.train`: each rank holds some of the experts, and the ranks train the
model of one process, to rounding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model.expert.models import StackedExperts
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training.subjects import Fails, LastState, Trained, each_of, off
from training.texts import count, entropy, first, texts_of

import lockstep as ls
from lockstep.base.errors import DataError, LossError, PlanError, RecipeError, UserError
from lockstep.testing.pool import WorkerPool

WORDS, WIDTH, TOKENS, EXPERTS = 11, 6, 10, 8
PLANS = {
    2: ("expert=2", "expert=2,checkpointing=full"),
    4: (
        "replicate=2,expert=2",
        "shard=2,expert=2,checkpointing=selective",
        "expert=2,context=2,checkpointing=full",
    ),
}
"""Number of processes -> plans. For expert=4 see test_expert_bits.py."""


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


texts = partial(texts_of, WORDS, TOKENS)


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


def train(run_dir: str, plan: str, **changes: Any) -> Trained:
    """Return the model, the last loss and the metrics."""
    last = LastState()
    result = ls.train(recipe(**changes), plan=plan, run_dir=run_dir, hooks=[last], log_every=1)
    return last.state, [result.loss, *result.metrics.values()]


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


class Adapted(Generator):
    """Trains the last layers alone. Its first tensor needs a gradient all the same, as with PEFT's
    `enable_input_require_grads`."""

    def __init__(self) -> None:
        super().__init__()
        self.words.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.words.register_forward_hook(lambda _, __, output: output.requires_grad_())


def train_adapted(folder: str, plan: str) -> list[Trained]:
    given: dict[str, Any] = {"model": Adapted, "sequence": None}
    return [train(f"{folder}/{each}", each, **given) for each in (plan, f"{plan},numerics=bitwise")]


def test_dummies_exchange_what_tensors_other_than_parameters_need(
    pool: WorkerPool, tmp_path: Path
) -> None:
    ((expected, _),) = pool.run(1, train_adapted, str(tmp_path), "replicate=1")
    for several in pool.run(2, train_adapted, str(tmp_path), "expert=2"):
        for found in several:
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


class Shared(Generator):
    """Two blocks with one module of experts; the first one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        first, second = self.blocks
        second.experts = first.experts
        self.blocks.append(first)


SHARED_PLANS = {
    2: ("expert=2,numerics=bitwise",),
    4: ("shard=2,expert=2", "shard=2,expert=2,numerics=bitwise", "expert=2,context=2"),
}


def train_shared(folder: str, plans: Sequence[str]) -> list[Trained]:
    return [train(f"{folder}/{len(plans)}-{plan}", plan, model=Shared) for plan in plans]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_that_a_forward_calls_several_times(
    pool: WorkerPool, tmp_path: Path, size: int
) -> None:
    alone = ("replicate=1", "numerics=bitwise")
    ((expected, bits),) = pool.run(1, train_shared, str(tmp_path), alone)
    for rank in pool.run(size, train_shared, str(tmp_path), SHARED_PLANS[size]):
        for plan, found in zip(SHARED_PLANS[size], rank, strict=True):
            assert off(found, expected) < 1e-12, plan
            if "bitwise" in plan:
                assert off(found, bits) == 0, plan
    said = pool.run(2, begin, str(tmp_path / "resumed"), "expert=2,checkpointing=full", Shared)
    assert set(said) == {"a step too far"}
    (resumed,) = pool.run(1, train_again, str(tmp_path / "resumed"))
    assert off(resumed, expected) < 1e-12


def train_again(run_dir: str) -> Trained:
    return train(run_dir, "replicate=1", model=Shared)


def begin(run_dir: str, plan: str, model: type[nn.Module] = Generator) -> str:
    """Train until it fails after a checkpoint."""
    given = {"plan": plan, "run_dir": run_dir, "hooks": [Fails()], "log_every": 1}
    try:
        return ls.train(recipe(model=model), saving=ls.Saving(every=2), **given).plan
    except DataError as error:
        return str(error)


def test_a_run_goes_on_under_another_plan(pool: WorkerPool, tmp_path: Path, alone: Trained) -> None:
    """For plans before and after, see test_expert_bits.py."""
    assert set(pool.run(2, begin, str(tmp_path), "replicate=2")) == {"a step too far"}
    for found in pool.run(2, train, str(tmp_path), "expert=2"):
        assert off(found, alone) < 1e-12


def train_pretrained(folder: str, plan: str) -> Trained:
    return train(f"{folder}/{plan}", plan, weights=f"{folder}/weights.safetensors", steps=1)


def test_pretrained_weights(pool: WorkerPool, tmp_path: Path) -> None:
    torch.manual_seed(4)
    save_file(Generator().state_dict(), tmp_path / "weights.safetensors")
    (expected,) = pool.run(1, train_pretrained, str(tmp_path), "replicate=1")
    for found in pool.run(2, train_pretrained, str(tmp_path), "expert=2"):
        assert off(found, expected) < 1e-12


class Listed(Block):
    """Has its experts in a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return x + sum(weights[..., e, None] * each(x) for e, each in enumerate(self.experts))  # type: ignore[no-any-return]


def listed() -> nn.Module:
    return Generator(Listed)


def poisoned() -> nn.Module:
    """NaN in the router for one word, which one sample has."""
    model = Generator()
    with torch.no_grad():
        model.words.weight[WORDS - 1] = torch.nan
    return model


def texts_with_one_word() -> TensorDataset:
    text, labels = texts(14).tensors
    text, labels = text.clamp(max=WORDS - 2), labels.clamp(max=WORDS - 2)
    text[0, 3] = WORDS - 1
    return TensorDataset(text, labels)


class Astray(Block):
    """Chooses an expert that does not exist, for one word."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        index = torch.where(tokens[:, :1].isnan(), EXPERTS, index)
        tokens = tokens.nan_to_num()
        return self.experts(tokens, index, weights.nan_to_num()).view_as(x)  # type: ignore[no-any-return]


def astray() -> nn.Module:
    model = Generator(Astray)
    with torch.no_grad():
        model.words.weight[WORDS - 1] = torch.nan
    return model


class Skipping(Generator):
    """Leaves blocks out at random, as stochastic depth does; the remedy multiplies them by 0."""

    def __init__(self, *, calls_all: bool = False) -> None:
        super().__init__()
        self.calls_all = calls_all

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for block, keep in zip(self.blocks, torch.rand(2) < 0.5, strict=True):
            if self.calls_all:
                x = x + keep * (block(x) - x)
            elif keep:
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def keeping() -> nn.Module:
    return Skipping(calls_all=True)


NAMED = ["blocks.*.experts"]
REFUSED: list[tuple[str, dict[str, Any], type[UserError], str, tuple[str, dict[str, Any]]]] = [
    (
        "expert=3",
        {},
        PlanError,
        "blocks.0.experts has 8 experts; each rank must hold equally many; choose expert=2 or",
        ("expert=2", {"experts": NAMED}),
    ),
    (
        "expert=2",
        {"model": listed},
        RecipeError,
        "blocks.0.experts is a list of 8 modules",
        ("replicate=2", {"model": listed}),
    ),
    (
        "expert=2",
        {"model": listed, "experts": ["blocks.*.router"]},
        RecipeError,
        "name the modules of experts in Recipe.experts, or leave expert out",
        ("replicate=2", {"model": listed}),
    ),
    (
        "expert=2",
        {"experts": ["blocks.*.norm"]},
        RecipeError,
        "was called with",
        ("expert=2", {"experts": NAMED}),
    ),
    (
        "expert=2",
        {"model": poisoned, "data": texts_with_one_word()},
        LossError,
        "",
        ("expert=2", {}),
    ),
    (
        "expert=2",
        {"model": astray, "data": texts_with_one_word()},
        RecipeError,
        "was called with experts from 0 to 8 on rank",
        ("expert=2", {}),
    ),
    (
        "expert=2",
        {"model": Skipping},
        RecipeError,
        "multiply the output of a block by 0 instead of leaving it out",
        ("expert=2", {"model": keeping}),
    ),
    (
        "expert=2",
        {"model": Skipping},
        RecipeError,
        "or use replicate or shard",
        ("shard=2", {"model": Skipping}),
    ),
]


SMALL: dict[str, Any] = {"evaluation": None, "sequence": None, "steps": 2}


def refused(folder: str, plan: str, changes: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(UserError) as raised:
        ls.train(recipe(**SMALL | changes), plan=plan, run_dir=folder)
    return type(raised.value).__name__, str(raised.value)


def follow(folder: str, cases: Sequence[int]) -> list[tuple[str, str]]:
    """Return the error of each case. Each remedy is trained once."""
    wrong = [REFUSED[case][:2] for case in cases]
    found = each_of(refused, f"{folder}/wrong", wrong)
    for number, (*_, (plan, changes)) in enumerate(REFUSED[case] for case in cases):
        is_last = all(REFUSED[case][-1] != (plan, changes) for case in cases[number + 1 :])
        if is_last and int(plan[-1]) == int(os.environ["WORLD_SIZE"]):
            ls.train(recipe(**SMALL | changes), plan=plan, run_dir=f"{folder}/right-{number}")
    return found


@pytest.mark.timeout(120)
def test_refused(pool: WorkerPool, tmp_path: Path) -> None:
    """On all ranks alike; and what the error recommends trains."""
    for size, cases in {3: [0], 2: range(1, len(REFUSED))}.items():
        ranks = pool.run(size, follow, str(tmp_path / str(size)), cases, timeout_seconds=110)
        assert ranks == ranks[:1] * size
        for case, (kind, said) in zip(cases, ranks[0], strict=True):
            _, _, expected, text, _ = REFUSED[case]
            assert kind == expected.__name__
            assert text in said
