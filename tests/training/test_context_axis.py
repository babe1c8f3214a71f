"""The axis `context` under `ls.train`: ranks share out the tokens of each sequence, and train the
model of one process, to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training.subjects import Fails, LastState, Trained, each_of, learned, off
from training.texts import first, is_right, texts_of, weighted

import lockstep as ls
from lockstep.base.errors import DataError, PlanError
from lockstep.testing.pool import WorkerPool

WORDS, WIDTH, HEADS, TOKENS = 11, 16, 4, 37
CHUNKS = ls.Sequence(chunks=8)
COLUMNS = dict.fromkeys(["blocks.*.query", "blocks.*.key", "blocks.*.value"], "colwise")
PLANS = {
    2: ("context=2", "context=2,exchange=heads,checkpointing=full"),
    3: ("context=3",),
    4: (
        "replicate=2,context=2",
        "shard=2,context=2,checkpointing=selective",
        "context=2,tensor=2",
    ),
}
"""Number of processes -> plans."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        normed = self.norm(x)
        given = (each(normed) for each in (self.query, self.key, self.value))
        heads = [each.view(samples, tokens, -1, WIDTH // HEADS).transpose(1, 2) for each in given]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.dropout(self.out(y.transpose(1, 2).reshape(samples, tokens, -1)))  # type: ignore[no-any-return]


class Generator(nn.Module):
    """(samples, tokens) words -> (samples, tokens, WORDS) logits. Float64."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.double()

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Undropped(Generator):
    """Draws no random numbers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.dropout.p = 0.0


texts = partial(texts_of, WORDS, TOKENS)


def terms(output: Tensor, batch: Sequence[Tensor]) -> dict[str, Any]:
    entropy = F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return {
        "words": ls.Sum(entropy),
        "size": ls.Sum(0.01 * output.logsumexp(2).square().sum()),
    }


def counts(batch: Sequence[Tensor]) -> dict[str, Any]:
    return {"words": (batch[1] != -100).sum(), "size": batch[1].numel()}


def lasts(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (output[:, -1], output.sum(1))


def spread(last: Tensor, total: Tensor) -> float:
    return float(last.std() + total.std())


def recipe(**changes: Any) -> ls.Recipe:
    metrics = {"accuracy": ls.Mean(is_right), "spread": ls.Gathered(lasts, spread)}
    given: dict[str, Any] = {
        "model": Generator,
        "data": texts(14),
        "inputs": first,
        "loss": terms,
        "weight": counts,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        "clip_norm": 0.5,
        "global_batch": 6,
        "microbatch": 2,
        "steps": 3,
        "sequence": CHUNKS,
        "tensor": COLUMNS | {"blocks.*.out": "rowwise"},
        "evaluation": ls.Evaluation(data=texts(5, seed=9), every=2, metrics=metrics),
        **changes,
    }
    return ls.Recipe(**given)


def size(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    """A mean over samples, of a sum over tokens."""
    return output.square().mean(2).sum(1).mean()


RECIPES: list[dict[str, Any]] = [
    {},
    {"loss": weighted, "weight": None, "evaluation": None},
    {
        "loss": size,
        "weight": None,
        "data": TensorDataset(*texts(14).tensors[:1] * 2),
        "evaluation": ls.Evaluation(data=TensorDataset(*texts(5).tensors[:1] * 2)),
        "steps": 2,
        "stages": ["words", "places", "blocks.*", "head"],
    },
]
"""Several terms with metrics; a weight that the forward computes; a mean over samples, and parts
that draw from streams of their own."""
ALL = range(len(RECIPES))


def train(run_dir: str, plan: str, **changes: Any) -> Trained:
    """Return the model, the last loss and the metrics."""
    last = LastState()
    result = ls.train(recipe(**changes), plan=plan, run_dir=run_dir, hooks=[last], log_every=1)
    assert not {"loss-not-checked", "loss-keeps-state"} & {event.name for event in result.events}
    return last.state, [result.loss, *result.metrics.values()]


def train_all(run_dir: str, plan: str, numbers: Sequence[int] = ALL, **more: Any) -> list[Trained]:
    return [train(f"{run_dir}/{number}", plan, **RECIPES[number], **more) for number in numbers]


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    folder = tmp_path_factory.mktemp("alone")
    (found,) = pool.run(1, train_all, str(folder), "replicate=1")
    return with_logged(found, folder, ALL)


def with_logged(found: list[Trained], folder: Path, recipes: Sequence[int]) -> list[Trained]:
    """Add the numbers of metrics.jsonl."""
    return [
        (
            state,
            [*numbers, *(value for row in learned(folder / str(run)) for value in row.values())],
        )
        for run, (state, numbers) in zip(recipes, found, strict=True)
    ]


Cases = list[tuple[str, Sequence[int]]]
"""Plans, and numbers of the recipes that each of them trains."""


def train_each(folder: str, cases: Cases) -> list[Any]:
    found = each_of(train_all, folder, cases)
    if any(plan == "context=2,tensor=2" for plan, _ in cases):
        styles = COLUMNS | {"blocks.*.out": "rowwise_sequence", "blocks.*.norm": "sequence"}
        with pytest.raises(PlanError, match=r"both divide the tokens of a sequence; choose col"):
            train_all(f"{folder}/refused", "context=2,tensor=2", tensor=styles)
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, [(plan, ALL) for plan in PLANS[2]]),
        (3, [(plan, ALL) for plan in PLANS[3]]),
        (4, [(plan, [number]) for plan, number in zip(PLANS[4], ALL, strict=True)]),
        pytest.param(4, [(plan, ALL) for plan in PLANS[4]], marks=pytest.mark.slow),
        pytest.param(4, [("context=4", ALL)], marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_out_tokens_train_the_model_of_one_process(
    pool: WorkerPool, tmp_path: Path, alone: list[Trained], size: int, cases: Cases
) -> None:
    for rank in pool.run(size, train_each, str(tmp_path), cases, timeout_seconds=110):
        for run, ((plan, numbers), found) in enumerate(zip(cases, rank, strict=True)):
            assert not isinstance(found, str), (plan, found)
            logged = with_logged(found, tmp_path / str(run), numbers)
            for number, mine in zip(numbers, logged, strict=True):
                assert off(mine, alone[number]) < 1e-12, (plan, number)


def begin(run_dir: str, plan: str) -> str:
    """Train the first recipe until it fails after a checkpoint."""
    given = {"plan": plan, "run_dir": run_dir, "hooks": [Fails()], "log_every": 1}
    try:
        return ls.train(recipe(), saving=ls.Saving(every=2), **given).plan
    except DataError as error:
        return str(error)


def test_a_run_goes_on_under_another_plan(
    pool: WorkerPool, tmp_path: Path, alone: list[Trained]
) -> None:
    state, numbers = alone[0]
    for number, (first_plan, second_plan) in enumerate(
        [("replicate=2", "context=3"), ("context=3", "shard=2")]
    ):
        folder = str(tmp_path / str(number))
        said = pool.run(int(first_plan[-1]), begin, folder, first_plan)
        assert set(said) == {"a step too far"}
        for found in pool.run(int(second_plan[-1]), train, folder, second_plan):
            assert off(found, (state, numbers[: len(found[1])])) < 1e-12, (first_plan, second_plan)


def squares(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (output.square().mean((1, 2)),)


BATCH_LOSS = {
    "batch_loss": ls.Gathered(squares, lambda rows: rows.square().mean()),
    "loss": None,
    "weight": None,
    "evaluation": None,
}


def whole_loss(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Any]:
    return terms(model(batch[0]), batch)


def looped(run_dir: str, plan: str, body: str) -> float:
    """A loop of one's own."""
    with ls.Session(run_dir=run_dir, plan=plan) as session:
        model, _ = session.prepare(
            Generator, lambda model: torch.optim.SGD(model.parameters(), lr=0.3), sequence=CHUNKS
        )
        given = {"global_batch": 6, "microbatch": 2, "steps": 1, "weight": counts}
        for step in session.steps(texts(14), **given):
            if body == "compute":
                step.compute(first, terms)
            else:
                for batch in step.microbatches():
                    step.backward(terms(model(batch[0]), batch))
            step.commit()
        return sum(float(value.sum()) for value in session.full_state_dict().values())


def run_case(run_dir: str, plan: str, changes: dict[str, Any] | str) -> float:
    """Return a number that differs where anything else was learned."""
    if isinstance(changes, str):
        return looped(run_dir, plan, changes)
    small = {"steps": 1, "evaluation": None}
    return ls.train(recipe(**{**small, **changes}), plan=plan, run_dir=run_dir).loss


def rounded(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return size(output.bfloat16(), batch)


SIZE = {"loss": size, "weight": None, "data": TensorDataset(*texts(14).tensors[:1] * 2)}
SHORTHAND = {"inputs": None, "loss": whole_loss}
REFUSED: list[tuple[str, Any, str, list[tuple[str, Any]]]] = [
    (
        "context=2,numerics=bitwise",
        {"sequence": None, "model": Undropped},
        "give Recipe(sequence=ls.Sequence())",
        [("context=2,numerics=bitwise", {"sequence": CHUNKS, "model": Undropped})],
    ),
    (
        "context=2,numerics=bitwise,exchange=heads",
        {},
        "leave exchange=heads out, or numerics=bitwise",
        [("context=2,numerics=bitwise", {}), ("context=2,exchange=heads", {})],
    ),
    ("context=2,compile=yes", {}, "leave compile=yes out, or context", [("context=2", {})]),
    (
        "context=2",
        {"sequence": ls.Sequence(chunks=3)},
        "give Recipe(sequence=ls.Sequence(chunks=4)), or a smaller",
        [("context=2", {"sequence": ls.Sequence(chunks=4)})],
    ),
    ("context=2", SHORTHAND, "give Recipe(inputs=lambda batch: ...", [("context=2", {})]),
    ("replicate=2", SHORTHAND, "give Recipe(inputs=lambda batch: ...", [("replicate=2", {})]),
    (
        "context=2",
        {"microbatch": "auto"},
        "auto is chosen by training with whole sequences; give a value",
        [("context=2", {})],
    ),
    (
        "context=2",
        {"gradient_compression": "bf16"},
        "use a plan with replicate only, or gradient_compression='none'",
        [("context=2", {})],
    ),
    (
        "context=2",
        {**SIZE, "loss": rounded},
        "the loss is summed in bfloat16; under context=2 it is computed for",
        [("context=2", SIZE)],
    ),
    (
        "context=2",
        BATCH_LOSS,
        "choose replicate or shard, without Recipe.sequence",
        [("replicate=2", {**BATCH_LOSS, "sequence": None})],
    ),
    (
        "context=2",
        "microbatches",
        "call step.compute(inputs, loss), with",
        [("context=2", "compute")],
    ),
]
"""A plan of two processes and changes of the recipe (or the loop of one's own), the words of the
error, and what it recommends."""


def follow(run_dir: str) -> list[tuple[str, list[float]]]:
    found = []
    for number, (plan, changes, _, remedies) in enumerate(REFUSED):
        (said,) = each_of(run_case, f"{run_dir}/{number}", [(plan, changes)])
        cases = each_of(run_case, f"{run_dir}/{number}-remedies", remedies, may_refuse=False)
        found.append((str(said), cases))
    return found


def follow_alone(run_dir: str) -> list[list[float]]:
    cases = [[("replicate=1", changes) for _, changes in remedies] for *_, remedies in REFUSED]
    return [
        each_of(run_case, f"{run_dir}/{number}", each, may_refuse=False)
        for number, each in enumerate(cases)
    ]


@pytest.mark.timeout(120)
def test_what_cannot_be_cut_is_refused_on_all_ranks_and_the_remedies_train_the_model_of_one_process(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (expected,) = pool.run(1, follow_alone, str(tmp_path / "alone"))
    for rank in pool.run(2, follow, str(tmp_path / "both"), timeout_seconds=110):
        for (*mistake, words, _), (said, found), numbers in zip(
            REFUSED, rank, expected, strict=True
        ):
            assert words in said, mistake
            assert found == pytest.approx(numbers, rel=1e-9), mistake
