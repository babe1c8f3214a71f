"""numerics=bitwise with slices: sharded layers compute in slices, so a training has the same bits
on any number of processes of `tensor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training.subjects import Fails, each_of, learned, muon_and_adamw
from training.texts import entropy, is_right, texts_of

import lockstep as ls
from lockstep.base.errors import CheckpointError, DataError, RecipeError
from lockstep.testing.pool import WorkerPool

ALONE = "replicate=1,numerics=bitwise,slices=8"
PLANS = {
    2: ("tensor=2,numerics=bitwise,slices=8,checkpointing=full",),
    4: (
        "tensor=4,numerics=bitwise,slices=8",
        "replicate=2,tensor=2,numerics=bitwise,slices=8",
        "shard=2,tensor=2,numerics=bitwise,slices=8,checkpointing=selective",
        "tensor=2,pipeline=2,numerics=bitwise,slices=8,schedule=zero-bubble",
    ),
    8: ("tensor=8,numerics=bitwise,slices=8",),
}
"""Number of processes -> plans."""
WORDS, WIDTH, HEADS, TOKENS = 48, 24, 8, 7
"""Slices of 3 features, whose tensors end between vectors of a processor."""


class Attention(nn.Module):
    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.eager = nn.Linear(WIDTH, WIDTH), eager

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], -1, WIDTH // HEADS)
        query, key, value = (
            each(x).view(split).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        if self.eager:
            scores = torch.matmul(query, key.transpose(2, 3)) / 2.0
            mixed = F.dropout(scores.softmax(-1), 0.1, self.training) @ value
            mixed = F.dropout(mixed.transpose(1, 2), 0.1, self.training).transpose(1, 2)
        else:
            dropped = 0.1 if self.training else 0.0
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, dropout_p=dropped
            )
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention = Attention(eager=eager)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.mix, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(self.dropout(F.gelu(self.up(self.norms[1](x)))))
        return x + self.back(self.mix(self.norms[2](x)).tanh())  # type: ignore[no-any-return]


class Speaker(nn.Module):
    """(batch, tokens) words -> logits."""

    def __init__(self, *, tied: bool = False, eager: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=None if tied else 5)
        self.blocks = nn.ModuleList(Block(eager=eager) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


STYLES = {
    **dict.fromkeys(["*.query", "*.key", "*.value", "*.up"], "colwise"),
    **dict.fromkeys(["*.out", "*.down"], "rowwise"),
    "*.mix": "colwise_gathered",
    "*.back": "rowwise_split",
    "words": "embedding",
    "head": "vocabulary",
}


texts = partial(texts_of, WORDS, TOKENS)


def recipe(**changes: Any) -> ls.Recipe:
    """Steps of 3 microbatches, of which the last is smaller."""
    given: dict[str, Any] = {
        "model": lambda: Speaker(tied=True),
        "tensor": STYLES,
        "data": texts(40),
        "inputs": lambda batch: batch[0],
        "loss": entropy,
        "weight": lambda batch: (batch[1] != -100).sum(),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "clip_norm": 0.2,
        "evaluation": ls.Evaluation(data=texts(5), metrics={"right": ls.Mean(is_right)}),
        "global_batch": 8,
        "microbatch": 3,
        "steps": 3,
        **changes,
    }
    return ls.Recipe(**given)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 40}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **layers))  # type: ignore[no-any-return]


def of_llama(output: Any, batch: Sequence[Tensor]) -> ls.Sum:
    return entropy(output.logits, batch)


def llama_is_right(output: Any, batch: Sequence[Tensor]) -> Tensor:
    return is_right(output.logits, batch)


RECIPES: list[dict[str, Any]] = [
    {"stages": ["words", "blocks.*", "head"]},
    {"tensor": {**STYLES, "head": "loss"}, "model": Speaker, "precision": "bf16", "steps": 2},
    {
        "tensor": {**STYLES, "head": "loss", "words": "colwise_gathered"},
        "model": lambda: Speaker(eager=True),
        "optimizer": muon_and_adamw,
        "steps": 2,
    },
    {
        "model": llama,
        "tensor": None,
        "steps": 2,
        "loss": of_llama,
        "evaluation": ls.Evaluation(data=texts(5), metrics={"right": ls.Mean(llama_is_right)}),
    },
]
"""Tied words, and attention with dropout; a loss of sharded logits in bf16, and a padding word;
attention of two products, an embedding by features, and an optimizer of whole matrices; a model of
transformers."""
Trained = tuple[str | None, list[float]]


def train(run_dir: str, plan: str, **changes: Any) -> Trained:
    """Return the fingerprint, and the numbers of the result."""
    result = ls.train(recipe(**changes), plan=plan, run_dir=run_dir, log_every=1)
    return result.fingerprint, [result.loss, *result.metrics.values()]


def recipes_of(plan: str) -> list[dict[str, Any]]:
    """Return the recipes to train under a plan: a pipeline needs stages, and eight processes take
    long."""
    return RECIPES[:1] if "pipeline" in plan or "tensor=8" in plan else RECIPES


def train_all(run_dir: str, plan: str) -> list[Trained]:
    return each_of(
        lambda folder, changes: train(folder, plan, **changes),
        run_dir,
        [(changes,) for changes in recipes_of(plan)],
        may_refuse=False,
    )


def train_each(run_dir: str, plans: Sequence[str]) -> list[list[Trained]]:
    return each_of(train_all, run_dir, [(plan,) for plan in plans], may_refuse=False)


@pytest.fixture(scope="module")
def alone(
    pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Any:
    """The models of the recipes, and what their trainings log."""
    pytest.importorskip("transformers")
    request.getfixturevalue("transformers_in_pool")
    folder = tmp_path_factory.mktemp("alone")
    (found,) = pool.run(1, train_all, str(folder), ALONE)
    return found, [learned(folder / str(number)) for number in range(len(RECIPES))]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 8))]
)
def test_a_training_has_the_same_bits_on_any_number_of_processes(
    pool: WorkerPool, tmp_path: Path, alone: Any, size: int
) -> None:
    with nullcontext(pool) if size <= pool.max_workers else WorkerPool(size) as larger:
        ranks = larger.run(size, train_each, str(tmp_path), PLANS[size], timeout_seconds=140)
    for place, plan in enumerate(PLANS[size]):
        count = len(recipes_of(plan))
        numbers = [learned(tmp_path / str(place) / str(each)) for each in range(count)]
        for rank in ranks:
            assert [rank[place], numbers] == [found[:count] for found in alone], plan


def begin(run_dir: str, plan: str) -> None:
    """Train the first recipe until it fails, after a checkpoint."""
    given: Any = {"plan": plan, "run_dir": run_dir, "hooks": [Fails(2)], "log_every": 1}
    with pytest.raises(DataError, match="a step too far"):
        ls.train(recipe(**RECIPES[0]), saving=ls.Saving(every=1), **given)


def go_on(run_dir: str, plan: str) -> Trained:
    with pytest.raises(CheckpointError, match=r"slices \(of the plan\): 8, now 2; resume with"):
        train(run_dir, plan.replace("slices=8", "slices=2"), **RECIPES[0])
    return train(run_dir, plan, **RECIPES[0])


@pytest.mark.timeout(150)
def test_a_run_goes_on_with_the_same_bits_under_another_plan(
    pool: WorkerPool, tmp_path: Path, alone: Any
) -> None:
    (several,) = PLANS[2]
    for number, (ranks, first, second) in enumerate([(1, ALONE, several), (2, several, ALONE)]):
        folder = str(tmp_path / str(number))
        pool.run(ranks, begin, folder, first)
        for found in pool.run(3 - ranks, go_on, folder, second):
            assert found == alone[0][0], (first, second)


class Between(nn.Module):
    """Computes something between its sharded layers."""

    def __init__(
        self,
        compute: Callable[[Any, Tensor], Tensor],
        width: int = 8,
        layers: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(TOKENS, width), nn.Linear(width, WORDS)
        self.scale = nn.Parameter(torch.ones(1))
        self.compute, self.layers = compute, layers

    def forward(self, text: Tensor) -> Tensor:
        if self.layers is not None:
            return self.layers(self, text)
        return self.both(text.float())[:, None].expand(-1, TOKENS, -1)

    def both(self, x: Tensor) -> Tensor:
        return self.down(self.compute(self, self.up(x)))  # type: ignore[no-any-return]


def recomputed(model: Any, text: Tensor) -> Tensor:
    """Both layers, in a checkpoint that is not around their module."""
    given = text.float().requires_grad_()
    return checkpoint(model.both, given, use_reentrant=True)[:, None].expand(-1, TOKENS, -1)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def with_weight(model: Any, x: Tensor) -> Tensor:
    model.penalty = model.down.weight.square()
    return x


BETWEEN = {"up": "colwise", "down": "rowwise"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"tensor": {**STYLES, "*.norms.*": "sequence"}},
        "slices=2 with the style 'sequence' of 'blocks.0.norms.0'; it sums the gradients",
    ),
    (
        {"model": lambda: Between(lambda model, x: x * model.scale), "tensor": BETWEEN},
        "mul of scale, which is not sharded and has a gradient, and a tensor that is sharded",
    ),
    (
        {"model": lambda: Between(lambda _, x: F.alpha_dropout(x, 0.1, True)), "tensor": BETWEEN},
        "alpha_dropout of a tensor that is sharded over the tensor axis, with slices",
    ),
    (
        {"model": lambda: Between(with_weight), "tensor": BETWEEN},
        "square of a weight of down, which is sharded over the tensor axis, outside of that layer",
    ),
    (
        {"model": lambda: Between(lambda _, x: x @ torch.eye(x.shape[1])), "tensor": BETWEEN},
        "matmul of a tensor that is sharded over the tensor axis; with slices, products between",
    ),
    (
        {"model": lambda: Between(lambda _, x: x * x.softmax(0)), "tensor": BETWEEN},
        "softmax of a tensor that is sharded over the tensor axis, which adds over dims before its"
        " last",
    ),
    (
        {"model": lambda: Between(lambda _, x: x * x[:1]), "tensor": BETWEEN},
        "mul of a tensor that is sharded over the tensor axis, whose gradient is a sum over",
    ),
    (
        {"model": lambda: Between(lambda _, x: x * torch.trapezoid(x, dim=0)), "tensor": BETWEEN},
        "trapezoid of a tensor that is sharded over the tensor axis, which adds over dims before its"
        " last",
    ),
    (
        {"model": lambda: Between(lambda _, x: Doubled.apply(x)), "tensor": BETWEEN},
        "the backward of Doubled, between layers that are sharded over the tensor axis",
    ),
    (
        {"model": lambda: Between(lambda _, x: torch.func.vmap(F.gelu)(x)), "tensor": BETWEEN},
        "that lockstep has not seen a function of a sharded tensor return",
    ),
    (
        {
            "model": lambda: Between(lambda m, x: x, layers=recomputed),
            "tensor": BETWEEN,
        },
        "up, called outside of the forward of its module, between layers that are sharded",
    ),
    (
        {"model": lambda: Between(lambda _, x: x, 7), "tensor": BETWEEN},
        "up.weight of shape (7, 7) with",
    ),
]


def refusals(run_dir: str, plan: str) -> list[Any]:
    def refused(folder: str, changes: dict[str, Any]) -> Trained:
        return train(folder, plan, **{"evaluation": None, **changes})

    return each_of(refused, run_dir, [(changes,) for changes, _ in REFUSED])


def test_what_depends_on_the_number_of_ranks_is_refused_on_one_too(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (one,) = pool.run(1, refusals, str(tmp_path / "1"), ALONE.replace("=8", "=2"))
    ranks = pool.run(2, refusals, str(tmp_path / "2"), "tensor=2,numerics=bitwise,slices=2")
    for said in (one, *ranks):
        assert [error.startswith("RecipeError: ") for error in said] == [True] * len(REFUSED), said
        for error, (_, words) in zip(said, REFUSED, strict=True):
            assert words in error
    assert [error for error in ranks[0] if error not in one] == [ranks[0][-1]]


def with_noise(run_dir: str, noise: Callable[[Tensor, bool], Tensor]) -> None:
    def model() -> nn.Module:
        return Between(lambda model, x: x * noise(x, model.training))

    changes = {"model": model, "tensor": BETWEEN, "evaluation": None}
    train(run_dir, "tensor=2,numerics=bitwise,slices=2", **changes)


def noise_of_a_part(run_dir: str) -> None:
    """Each rank would draw the same numbers for its part. Dropout draws one mask, in evaluation
    and of a transposed tensor too."""
    noises: list[Callable[[Tensor, bool], Tensor]] = [
        lambda x, _: torch.rand(x.shape),
        lambda x, training: torch.rand(x.shape) if training else torch.ones(x.shape),
    ]
    for number, noise in enumerate(noises):
        with pytest.raises(RecipeError, match="mul of random numbers of shape"):
            with_noise(f"{run_dir}/{number}", noise)
    with_noise(f"{run_dir}/{len(noises)}", lambda x, _: F.dropout(x.mT, 0.1).mT)


def test_random_numbers_of_a_part_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, noise_of_a_part, str(tmp_path))
