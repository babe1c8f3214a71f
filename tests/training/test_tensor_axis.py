"""The tensor axis under `ls.train`, alone and with the data axes: what comes out is what one
process gives, to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import tiered
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training.subjects import LastState, adamw, each_of, recipe, rows

import lockstep as ls
from lockstep.comm.mesh import to_local
from lockstep.testing.pool import WorkerPool

PLANS = {
    "tensor=2": 2,
    "tensor=3": 3,
    "replicate=2,tensor=2": 4,
    "shard=2,tensor=2": 4,
    "tensor=2,checkpointing=full": 2,
}
AXES = ["tensor=2", "replicate=2,tensor=2", "shard=2,tensor=2"]
STYLES = {"*.up": "colwise", "*.down": "rowwise"}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 24)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.relu(self.up(self.norm(x)))))


def network() -> nn.Module:
    return nn.Sequential(nn.Sequential(Perceptron(), Perceptron()), nn.Linear(6, 3))


def distances(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return (model(batch[1]) - batch[2]).abs().mean(1)


class Transposed(nn.Module):
    """What follows the cut layers hands a gradient back that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = Perceptron(), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.inner(torch.stack([x, -x], dim=1))
        return self.head(self.norm(pairs.transpose(1, 2)).transpose(1, 2)).mean(1)  # type: ignore[no-any-return]


def train_transposed(plan: str, run_dir: str) -> float:
    return ls.train(
        recipe(model=Transposed, optimizer=adamw, tensor=STYLES, steps=3),
        plan=plan,
        run_dir=run_dir,
    ).loss


def train(plan: str, run_dir: str) -> tuple[ls.Result, dict[str, Tensor]]:
    last = LastState()
    evaluation = ls.Evaluation(data=rows(19, seed=9), metrics={"distance": ls.Mean(distances)})
    given = recipe(
        model=network,
        optimizer=adamw,
        tensor=STYLES,
        clip_norm=0.3,
        global_batch=10,
        evaluation=evaluation,
    )
    return ls.train(given, plan=plan, run_dir=run_dir, hooks=[last]), last.state


WORDS = 10


class Speaker(nn.Module):
    """(batch, length) words -> (batch, length, WORDS) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.body = Perceptron()
        self.head = nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.body(self.words(text)))


def sentences() -> TensorDataset:
    """Texts of 5 words, and labels of which none to four are ignored."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(WORDS, (24, 5), generator=generator)
    labels = text.roll(1, 1)
    for row, length in enumerate(torch.randint(1, 6, (24,), generator=generator).tolist()):
        labels[row, length:] = -100
    return TensorDataset(text, labels)


def summed(logits: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    return ls.Sum(
        F.cross_entropy(logits.view(-1, logits.shape[-1]), batch[1].flatten(), reduction="sum")
    )


def hits(logits: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return (logits.argmax(-1) == batch[1])[batch[1] != -100].float()


def speak(plan: str, run_dir: str, precision: Any) -> tuple[ls.Result, dict[str, Tensor]]:
    last = LastState()
    given = recipe(
        model=Speaker,
        optimizer=adamw,
        data=sentences(),
        inputs=itemgetter(0),
        loss=summed,
        weight=lambda batch: (batch[1] != -100).sum(),
        tensor={**STYLES, "words": "embedding", "head": "loss"},
        precision=precision,
        global_batch=10,
        evaluation=ls.Evaluation(data=sentences(), metrics={"accuracy": ls.Mean(hits)}),
    )
    return ls.train(given, plan=plan, run_dir=run_dir, hooks=[last]), last.state


class StopsOnOneRank(ls.Hook):
    def after_step(self, run: Any) -> None:
        if run.context.world.rank == 1:
            run.stop("enough")


def stop_on_one_rank(run_dir: str) -> int:
    given = recipe(model=network, optimizer=adamw, tensor=STYLES, steps=30)
    return ls.train(
        given, plan="tensor=2", run_dir=run_dir, hooks=[StopsOnOneRank()], log_every=2
    ).steps


class Attention(nn.Module):
    """Between 6 features, each sample a sequence of one; written for its number of heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.projection, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).view(len(x), self.heads, 6 // self.heads)
        return self.last(self.projection((query.softmax(-1) * query).reshape(len(x), 6)))


ATTENTION = {"query": "colwise", "projection": "rowwise"}


class LoudAtTheEnd(nn.Module):
    """The last of its hidden features is large, so that one column alone of the second layer's
    gradient overflows in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.up.bias[7] = 30.0
            self.down.weight[:, 7] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Gradients(ls.Hook):
    """After each step: the loss scale, and whether all that this rank holds of the gradient is
    finite."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, bool]] = []

    def after_step(self, run: Any) -> None:
        (pair,) = run.training.modules
        self.seen.append(
            (
                pair.loss_scale.value,
                all(
                    bool(torch.isfinite(to_local(gradient)).all()) for gradient in pair.gradients()
                ),
            )
        )


def overflow(plan: str, run_dir: str) -> tuple[list[int], list[tuple[float, bool]], str]:
    gradients = Gradients()
    given = recipe(
        model=LoudAtTheEnd,
        tensor={"up": "colwise", "down": "rowwise"},
        precision="fp16",
        clip_norm=1.0,
        steps=6,
    )
    result = ls.train(given, plan=plan, run_dir=run_dir, hooks=[gradients])
    return (
        [event.step for event in result.events if event.name == "step-skipped"],
        gradients.seen,
        result.fingerprint,
    )


def refused(run_dir: str, changes: dict[str, Any]) -> None:
    ls.train(recipe(**{"model": network, **changes}), plan="tensor=2", run_dir=run_dir)


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"tensor": {"*.gate": "colwise"}},
        ("Recipe.tensor has '*.gate', which matches no module of the model; modules are 0, 0.0,",),
    ),
    (
        {},
        (
            "tensor or slices on a model without a map of its layers; both are for mapped layers"
            " only",
            "give Recipe(tensor=",
        ),
    ),
    (
        {"model": partial(Attention, 3), "tensor": ATTENTION},
        (
            "Attention has heads=3 with tensor=2",
            "each rank computes whole heads, and 3 is not a multiple of 2",
            "choose a tensor axis that divides the heads, or leave this attention whole",
        ),
    ),
    (
        {"model": partial(Attention, 2), "tensor": ATTENTION},
        (
            "code there must not name their full number",
            "write -1 for the heads, as in query.view(batch, length, -1, head_dim)",
        ),
    ),
]


def all_under(plan: str, run_dir: str) -> dict[str, Any]:
    """What is trained under a plan: with every plan, and, if it is the axis alone, the rest."""
    found: dict[str, Any] = {"plain": train(plan, f"{run_dir}/plain")}
    if plan in ("replicate=1", *AXES):
        found["overflow"] = overflow(plan, f"{run_dir}/overflow")
    if plan in ("replicate=1", "tensor=2", "replicate=2,tensor=2"):
        found["fp32"] = speak(plan, f"{run_dir}/speak", "fp32")
    if plan in ("replicate=1", "replicate=2,tensor=2"):
        found["bf16"] = speak(plan, f"{run_dir}/bf16", "bf16")
    if plan in ("replicate=1", "tensor=2"):
        found["transposed"] = train_transposed(plan, f"{run_dir}/transposed")
    if plan == "tensor=2":
        found["stopped"] = stop_on_one_rank(f"{run_dir}/stopped")
        found["refused"] = each_of(refused, run_dir, [(changes,) for changes, _ in REFUSED])
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return all_under("replicate=1", str(tmp_path_factory.mktemp("alone")))


@pytest.fixture(scope="module")
def found(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what each rank finds under a plan."""
    return cache(
        lambda plan: pool.run(PLANS[plan], all_under, plan, str(tmp_path_factory.mktemp("run")))
    )


EVERY_PLAN = tiered(PLANS, always=["shard=2,tensor=2"], most=3)


@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_training_gives_the_model_of_one_process(
    alone: dict[str, Any], found: Any, plan: str
) -> None:
    """With its own loss, or one of logits that are cut over the ranks."""
    for rank in found(plan):
        for name, most in (("plain", 1e-5), ("fp32", 1e-5), ("bf16", 2e-2)):
            if name not in rank:
                continue
            (result, state), (expected, truth) = rank[name], alone[name]
            assert result.loss == pytest.approx(expected.loss, rel=most), name
            metrics = (
                {**result.metrics, "accuracy": expected.metrics["accuracy"]}
                if name == "bf16"
                else result.metrics
            )
            assert metrics == pytest.approx(expected.metrics, rel=most), name
            torch.testing.assert_close(state, truth, rtol=10 * most, atol=most)


@pytest.mark.slow
def test_the_loss_of_cut_logits_is_that_of_one_process_where_the_model_is_sharded_too(
    pool: WorkerPool, tmp_path: Path, alone: dict[str, Any]
) -> None:
    expected, truth = alone["fp32"]
    for result, state in pool.run(4, speak, "shard=2,tensor=2", str(tmp_path), "fp32"):
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
        torch.testing.assert_close(state, truth, rtol=1e-4, atol=1e-5)


def test_the_code_after_a_cut_layer_may_transpose_and_any_rank_may_stop_the_run(
    alone: dict[str, Any], found: Any
) -> None:
    for rank in found("tensor=2"):
        assert rank["transposed"] == pytest.approx(alone["transposed"], rel=1e-5)
        assert rank["stopped"] == 2


def test_what_cannot_be_cut_is_refused_on_all_ranks(found: Any) -> None:
    one, other = (rank["refused"] for rank in found("tensor=2"))
    assert one == other
    for (changes, words), said in zip(REFUSED, one, strict=True):
        assert said.startswith("RecipeError: "), changes
        assert all(each in said for each in words), (changes, said)


@pytest.mark.parametrize(
    "plan", tiered({plan: PLANS[plan] for plan in AXES}, always=["shard=2,tensor=2"], most=3)
)
def test_what_overflows_on_one_tensor_rank_is_skipped_on_all(
    alone: dict[str, Any], found: Any, plan: str
) -> None:
    expected, scales, _ = alone["overflow"]
    assert 0 < len(expected) < 6
    everyone = [rank["overflow"] for rank in found(plan)]
    assert [seen[0][1] for _, seen, _ in everyone] == [True, False] * (PLANS[plan] // 2)
    for skipped, seen, fingerprint in everyone:
        assert skipped == expected
        assert [scale for scale, _ in seen] == [scale for scale, _ in scales]
        assert fingerprint == everyone[0][2]
