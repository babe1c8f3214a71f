"""Sequences in a pipeline: each stage computes a rank's tokens, and what comes out is the model of
one process: to rounding, or with bitwise numerics to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate
from training.subjects import Fails, FullState, Trained, adamw, each_of, learned, off
from training.test_context_axis import TOKENS, WIDTH, WORDS, Attention, recipe, texts
from training.texts import cropped, weighted

import lockstep as ls
from lockstep.base.errors import DataError
from lockstep.testing.pool import WorkerPool

STAGES = ["embedding", "blocks.*", "head"]
ALONE = "replicate=1"
PLANS = {
    2: [("pipeline=2", 0), ("pipeline=2", 1)],
    4: [
        ("pipeline=2,context=2,exchange=keys,schedule=zero-bubble", 0),
        ("pipeline=2,context=2,exchange=keys,schedule=zero-bubble", 1),
        ("pipeline=2,context=2,exchange=heads,schedule=interleaved,checkpointing=full", 1),
        ("shard=2,pipeline=2", 0),
    ],
}
"""Number of processes -> plans and numbers of `RECIPES`."""


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, text: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(text.shape[1])
        return self.dropout(self.words(text) + self.places(positions))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Tied; also returns what belongs to no token."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": F.linear(x, self.weight), "scale": self.weight.new_ones(3)}


class Generator(nn.Module):
    """(samples, tokens) words -> logits. Float64, in stages. `wrong`: what a stage does that cannot
    be cut."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Attention() for _ in range(3))
        if wrong:
            self.blocks[2 if wrong == "mean" else 0] = Wrong(wrong)
        self.head = Head(self.embedding.words.weight)
        self.double()

    def forward(self, text: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(text, positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Idle(Generator):
    """Has layers in its last stage that are not used, or not in training."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = Evaluated().double()


class Evaluated(Attention):
    """Is left out in training."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else super().forward(x)  # type: ignore[no-any-return]


class Wrong(nn.Module):
    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong, self.layer = wrong, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer(x)
        if self.wrong == "mean":
            x = x - x.mean(1, keepdim=True)
        elif self.wrong == "class token":
            x = x[:, :1]
        elif self.wrong == "one length":
            x = x + torch.ones(TOKENS, 1, dtype=x.dtype)
        elif self.wrong == "dropped":
            torch.randperm(x.shape[1])
        return x


def packed(rows: Sequence[Any]) -> list[Tensor]:
    """A batch of two documents in each row, of other lengths in each, with the document of each
    token. No token predicts the first of a document."""
    text, labels, document = crossed(rows)
    return [text, labels.masked_fill(F.pad(document.diff(dim=1) != 0, (0, 1)), -100), document]


def crossed(rows: Sequence[Any]) -> list[Tensor]:
    text, labels = default_collate(rows)
    return [text, labels, (torch.arange(TOKENS) >= 3 + text[:, :1]).long()]


def logits(output: dict[str, Tensor]) -> Tensor:
    return output["logits"] * output["scale"][0]


def shifting(output: dict[str, Tensor], batch: Sequence[Tensor]) -> ls.Sum:
    """A loss that shifts its labels."""
    pairs = logits(output)[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()
    return ls.Sum(F.cross_entropy(*pairs, reduction="sum"))


def summed(output: dict[str, Tensor], batch: Sequence[Tensor]) -> ls.Loss:
    return weighted(logits(output), batch)


def right(output: dict[str, Tensor], batch: Sequence[Tensor]) -> Tensor:
    return (output["logits"].argmax(2) == batch[1])[batch[1] != -100].double()


EVALUATION = ls.Evaluation(data=texts(5, seed=9), every=2, metrics={"right": ls.Mean(right)})
SHIFTING: dict[str, Any] = {
    "loss": shifting,
    "weight": lambda batch: batch[0][:, 1:].numel(),
    "collate": cropped,
    "sequence": ls.Sequence(chunks=4),
    "evaluation": EVALUATION,
}
DOCUMENTS: dict[str, Any] = {
    "loss": summed,
    "weight": None,
    "collate": packed,
    "sequence": ls.Sequence(chunks=4, documents=lambda batch: batch[2], positions="positions"),
    "evaluation": None,
}
RECIPES = [SHIFTING, DOCUMENTS]


def train(run_dir: str, plan: str, changes: dict[str, Any]) -> Trained:
    """Return the model, the loss and the metrics."""
    held = FullState()
    given = {"model": Generator, "stages": STAGES, "tensor": None, "global_batch": 8, "steps": 2}
    result = ls.train(recipe(**given | changes), plan=plan, run_dir=run_dir, hooks=[held])
    return held.state, [result.loss, *result.metrics.values()]


def train_all(run_dir: str, cases: Sequence[tuple[str, int]]) -> list[Trained]:
    given = [(plan, RECIPES[number]) for plan, number in cases]
    return each_of(train, run_dir, given, may_refuse=False)


def refuse(run_dir: str, plan: str) -> list[str]:
    cases = [(plan, {"steps": 1, "evaluation": None, **changes}) for changes, _ in REFUSED]
    return list(map(str, each_of(train, run_dir, cases)))


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    cases = [(ALONE, number) for number in range(len(RECIPES))]
    (found,) = pool.run(1, train_all, str(tmp_path_factory.mktemp("alone")), cases)
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", PLANS)
def test_stages_of_sequences_train_the_model_of_one_process(
    pool: WorkerPool, tmp_path: Path, alone: list[Trained], size: int
) -> None:
    cases = PLANS[size]
    for rank in pool.run(size, train_all, str(tmp_path), cases, timeout_seconds=110):
        for (plan, number), found in zip(cases, rank, strict=True):
            assert off(found, alone[number]) < 1e-14, (plan, number)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": lambda: Generator("mean")}, "mean) computes a value of several tokens"),
    ({"model": lambda: Generator("class token")}, "without a dim 1 of 37 tokens"),
    ({"model": lambda: Generator("one length")}, "the model cannot compute the first 17 of 37"),
    ({"model": lambda: Generator("dropped")}, "draws other random numbers for a part"),
    ({"sequence": None}, "give Recipe(sequence=ls.Sequence())"),
    ({"stages": STAGES[::-1]}, "which comes first; a pipeline calls only the recipe's stages"),
    ({"loss": lambda output, batch: logits(output).mean()}, "the loss is not a sum over tokens"),
    (DOCUMENTS | {"collate": crossed}, "no token predicts the first of a document"),
]
"""Changes of the recipe, and words of the error."""


@pytest.mark.timeout(120)
def test_what_cannot_be_cut_in_a_stage_is_refused_on_all_ranks(
    pool: WorkerPool, tmp_path: Path
) -> None:
    plan = "pipeline=2,context=2"
    for rank in pool.run(4, refuse, str(tmp_path), plan, timeout_seconds=110):
        for said, (changes, words) in zip(rank, REFUSED, strict=True):
            assert words in said, changes


class Sharing(Generator):
    """Two blocks share a weight, which is used after the attention: threads of chunks change turns
    while one of the blocks uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].out.weight = self.blocks[0].out.weight


BITWISE: list[dict[str, Any]] = [
    SHIFTING | {"model": Sharing, "global_batch": 10, "steps": None, "epochs": 1},
    DOCUMENTS | {"model": lambda: Generator().float(), "precision": "bf16"},
    SHIFTING | {"model": Idle, "optimizer": adamw, "steps": 1},
]
"""Five microbatches in float64, and two in the last batch, with evaluations; documents in bf16;
idle parameters, which must not decay. All have tied weights, dropout and clipping."""
ALL = range(len(BITWISE))
BITWISE_PLANS = {
    2: {"pipeline=2": (1, 2), "pipeline=2,schedule=zero-bubble,checkpointing=full": (0,)},
    4: {"pipeline=2,context=2": (0, 1)},
}
"""Number of processes -> plan -> numbers of `BITWISE`."""
MORE_BITWISE_PLANS = {
    2: {
        "pipeline=2": (0,),
        "pipeline=2,schedule=zero-bubble,checkpointing=full": (1, 2),
        **dict.fromkeys(
            ("pipeline=2,schedule=gpipe", "pipeline=2,schedule=interleaved", "shard=2"), ALL
        ),
    },
    3: dict.fromkeys(("pipeline=3", "pipeline=3,schedule=zero-bubble"), ALL),
    4: {
        "pipeline=2,context=2": (2,),
        **dict.fromkeys(
            (
                "shard=2,pipeline=2",
                "shard=2,pipeline=2,schedule=zero-bubble,checkpointing=full",
                "pipeline=2,context=2,schedule=zero-bubble,checkpointing=full",
                "pipeline=2,context=2,schedule=interleaved",
                "replicate=2,pipeline=2,checkpointing=full",
            ),
            ALL,
        ),
    },
}
Bits = tuple[str | None, list[float]]


def train_bits(run_dir: str, plan: str, changes: dict[str, Any], **more: Any) -> Bits:
    """Return the fingerprint, and the numbers of the result."""
    given = {"model": Generator, "stages": STAGES, "tensor": None, "global_batch": 8, "steps": 2}
    result = ls.train(
        recipe(**given | changes),
        plan=f"{plan},numerics=bitwise",
        run_dir=run_dir,
        log_every=1,
        **more,
    )
    return result.fingerprint, [result.loss, *result.metrics.values()]


def train_all_bits(run_dir: str, cases: Sequence[tuple[str, int]]) -> list[Bits]:
    given = [(plan, BITWISE[number]) for plan, number in cases]
    return each_of(train_bits, run_dir, given, may_refuse=False)


@pytest.fixture(scope="module")
def bits(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of one process, and what it logs."""
    folder = tmp_path_factory.mktemp("bits")
    cases = [(ALONE, number) for number in ALL]
    (found,) = pool.run(1, train_all_bits, str(folder), cases, timeout_seconds=60)
    return found, [learned(folder / str(number)) for number in ALL]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("size", "plans"),
    [
        *BITWISE_PLANS.items(),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE_BITWISE_PLANS.items()),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_stages_of_chunks_have_the_bits_of_one_process(
    pool: WorkerPool, tmp_path: Path, bits: Any, size: int, plans: dict[str, Sequence[int]]
) -> None:
    results, rows = bits
    cases = [(plan, number) for plan, numbers in plans.items() for number in numbers]
    ranks = pool.run(size, train_all_bits, str(tmp_path), cases, timeout_seconds=140)
    for place, (plan, number) in enumerate(cases):
        assert [found[place] for found in ranks] == [results[number]] * size, (plan, number)
        assert learned(tmp_path / str(place)) == rows[number], (plan, number)


MANY: list[dict[str, Any]] = [
    SHIFTING | {"model": Idle, "optimizer": adamw, "global_batch": 9, "microbatch": 1},
    DOCUMENTS | {"global_batch": 9, "microbatch": 1},
]
"""Nine microbatches, so that two ranks have unequally many, and as many as interleaved stages."""


def train_many(run_dir: str, plans: Sequence[str]) -> list[Bits]:
    cases = [(plan, changes) for plan in plans for changes in MANY]
    return each_of(train_bits, run_dir, cases, may_refuse=False)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_sharded_stages_of_chunks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    with WorkerPool(8) as larger:
        (alone,) = larger.run(1, train_many, str(tmp_path / "alone"), [ALONE])
        for size, plans in {
            4: ("shard=2,pipeline=2,schedule=interleaved,sharding=gradients",),
            8: (
                "shard=2,pipeline=2,context=2,schedule=interleaved,checkpointing=full",
                "replicate=2,shard=2,pipeline=2,schedule=zero-bubble",
                "replicate=2,pipeline=2,context=2",
            ),
        }.items():
            folder = str(tmp_path / str(size))
            for found in larger.run(size, train_many, folder, plans, timeout_seconds=150):
                assert found == alone * len(plans), plans


def begin(run_dir: str, plan: str) -> None:
    with pytest.raises(DataError, match="a step too far"):
        train_bits(run_dir, plan, LONGER, hooks=[Fails()], saving=ls.Saving(every=2))


def go_on(run_dir: str, plan: str) -> Bits:
    return train_bits(run_dir, plan, LONGER)


LONGER = SHIFTING | {"steps": 4}


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_run_of_chunks_goes_on_with_the_same_bits_under_another_plan(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (expected,) = pool.run(1, go_on, str(tmp_path / "alone"), ALONE)
    for number, (ranks, first, others, second) in enumerate(
        [(2, "pipeline=2", 2, "context=2"), (4, "pipeline=2,context=2", 1, ALONE)]
    ):
        folder = str(tmp_path / str(number))
        pool.run(ranks, begin, folder, first, timeout_seconds=60)
        for found in pool.run(others, go_on, folder, second, timeout_seconds=60):
            assert found == expected, (first, second)
