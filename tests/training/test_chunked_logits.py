"""`logits=chunked` trains the model that whole logits train, under every plan that takes it; and
what its errors recommend trains on one and on two processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training.subjects import adamw

import lockstep as ls
from lockstep.base.errors import UserError
from lockstep.testing.pool import WorkerPool

CLASSES, FEATURES, TOKENS = 24, 8, 7
TEXTS = torch.randint(CLASSES, (24, TOKENS), generator=torch.Generator().manual_seed(0))


class Language(nn.Module):
    """A language model; its `head` may be its embedding, too."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, FEATURES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Dropout(0.1))
            for _ in range(2)
        )
        self.head = nn.Linear(FEATURES, CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.embedding(text)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def tokens(logits: Tensor, text: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten(), **how)


def summed(logits: Tensor, text: Tensor) -> ls.Sum:
    return ls.Sum(tokens(logits, text, reduction="sum"))


def of_some(logits: Tensor, text: Tensor) -> ls.Sum:
    """The loss of every second token."""
    return ls.Sum(tokens(logits, text, reduction="none")[::2].sum())


def numbers(text: Tensor) -> int:
    return text[:, 1:].numel()


def half_of_them(text: Tensor) -> int:
    return text[:, 1:].flatten()[::2].numel()


def recipe(**changes: Any) -> ls.Recipe:
    given: dict[str, Any] = {
        "model": Language,
        "data": TEXTS,
        "inputs": lambda text: text,
        "loss": tokens,
        "optimizer": adamw,
        "global_batch": 12,
        "microbatch": 2,
        "steps": 2,
        "head": "head",
        "blocks": ["blocks.*"],
        "stages": ["embedding", "blocks.*", "head"],
        "clip_norm": 1.0,
        "evaluation": ls.Evaluation(data=TEXTS[:9]),
    }
    return ls.Recipe(**{**given, **changes})


KINDS: dict[str, dict[str, Any]] = {
    "tied, sum": {"model": partial(Language, tied=True), "loss": summed, "weight": numbers},
    "none": {"loss": of_some, "weight": half_of_them},
    "bf16": {"precision": "bf16"},
}
PLANS: dict[int, dict[str, Sequence[str]]] = {
    1: dict.fromkeys(("replicate=1", "replicate=1,numerics=bitwise,logits=chunked"), tuple(KINDS)),
    2: {
        "replicate=2,numerics=bitwise,checkpointing=full,logits=chunked": ["tied, sum", "bf16"],
        "shard=2,numerics=bitwise,logits=chunked": ["none"],
        "shard=2,checkpointing=selective,logits=chunked": ["tied, sum", "bf16"],
        "pipeline=2,logits=chunked": ["tied, sum", "none"],
        "pipeline=2,schedule=zero-bubble,logits=chunked": ["tied, sum", "bf16"],
    },
    4: {"shard=2,pipeline=2,logits=chunked": [*KINDS]},
}
"""Number of processes -> plan -> names of `KINDS`."""


def trained(
    folder: str, plans: dict[str, Sequence[str]]
) -> dict[tuple[str, str], tuple[str, float, float]]:
    found = {}
    for plan, kinds in plans.items():
        for kind in kinds:
            given = recipe(**KINDS[kind])
            result = ls.train(given, run_dir=f"{folder}/{kind}/{plan}", plan=plan)
            found[kind, plan] = result.fingerprint, result.loss, result.metrics["loss"]
    return found


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_plan_trains_the_model_of_whole_logits(
    pool: WorkerPool, tmp_path: Path, processes: int
) -> None:
    (alone,) = pool.run(1, trained, str(tmp_path / "alone"), PLANS[1])
    (several, *_) = pool.run(
        processes, trained, str(tmp_path / "several"), PLANS[processes], timeout_seconds=50
    )
    for (kind, plan), (fingerprint, *losses) in {**alone, **several}.items():
        _, *whole = alone[kind, "replicate=1"]
        assert losses == pytest.approx(whole, rel=2e-3 if kind == "bf16" else 1e-5), (kind, plan)
        if "bitwise" in plan:
            assert fingerprint == alone[kind, [*PLANS[1]][-1]][0], (kind, plan)


def likelihood(logits: Tensor, text: Tensor) -> Tensor:
    return -F.log_softmax(logits[:, :-1], -1).gather(-1, text[:, 1:, None]).mean()


def probabilities(logits: Tensor, text: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), F.one_hot(text.flatten(), CLASSES).float(), reduction="mean"
    )


def classes(logits: Tensor, text: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), text.flatten())


def capped(logits: Tensor, text: Tensor) -> Tensor:
    return tokens((logits / 2).tanh() * 2, text)


def halved(logits: Tensor, text: Tensor) -> Tensor:
    return tokens(logits / 2, text)


class Halved(Language):
    """A head without bias, whose logits are halved before it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.blocks[1](self.blocks[0](self.embedding(text)))
        return self.head(hidden / 2)  # type: ignore[no-any-return]


class Adapted(Language):
    """A head with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(self.head)  # type: ignore[assignment]


def right(**changes: Any) -> Callable[[str, str], float]:
    def train(folder: str, plan: str) -> float:
        return ls.train(recipe(evaluation=None, **changes), run_dir=folder, plan=plan).loss

    return train


def whole(**changes: Any) -> Callable[[str, str], float]:
    train = right(**changes)
    return lambda folder, plan: train(folder, plan.replace(",logits=chunked", ""))


def loops(late: bool) -> Callable[[str, str], float]:
    """A loop of one's own over pairs of microbatches. `late`: it calls the loss of the second
    after the backward of the first."""

    def train(folder: str, plan: str) -> float:
        with ls.Session(run_dir=folder, plan=plan) as session:
            model, optimizer = session.prepare(Language, adamw, head="head")
            for step in session.steps(TEXTS, global_batch=8, microbatch=4, steps=2):
                for text in step.microbatches():
                    halves = text.chunk(2)
                    outputs = [model(half) for half in halves]
                    if late:
                        tokens(outputs[0], halves[0]).backward()
                    step.backward(sum(map(tokens, outputs, halves)) / 2)
                step.commit(optimizer)
            return session.run.loss

    return train


MISTAKES: dict[str, tuple[Callable[[str, str], float], Callable[[str, str], float]]] = {
    "give the logits to F.cross_entropy": (right(loss=likelihood), right()),
    'give reduction=\\"mean\\", \\"sum\\" or \\"none\\"'.replace("\\", ""): (
        right(loss=partial(tokens, size_average=True)),
        right(loss=partial(tokens, reduction="mean")),
    ),
    "give the index of a class for each token": (right(loss=probabilities), right(loss=classes)),
    "call it with logits.flatten(0, -2) and target.flatten()": (
        right(loss=F.cross_entropy),
        right(loss=classes),
    ),
    "name the nn.Linear that computes the logits": (right(head=None), right()),
    "name such a layer in Recipe.head": (
        right(model=Adapted, stages=None),
        right(model=Adapted, stages=None, head="head.0"),
    ),
    "leave logits=chunked out for a soft cap (torch.tanh)": (
        right(loss=capped),
        whole(loss=capped),
    ),
    "a head without bias can be given a factor before it: head(x / 30)": (
        right(loss=halved),
        right(model=Halved, stages=None),
    ),
    "choose bf16 or fp32 as the precision": (right(precision="fp16"), right()),
}
UNDER_SHARD = {"compute each loss before the backward": (loops(late=True), loops(late=False))}


def followed(folder: str, axes: str, late: bool) -> list[tuple[str, str, float]]:
    found = []
    for place, (says, (mistake, remedy)) in enumerate(
        (MISTAKES | (UNDER_SHARD if late else {})).items()
    ):
        run, plan = f"{folder}/{place}", f"{axes},logits=chunked"
        try:
            mistake(run, plan)
            said = "not refused"
        except UserError as error:
            said = str(error)
        found.append((says, said, remedy(run, plan)))
    return found


def test_what_the_errors_recommend_trains(pool: WorkerPool, tmp_path: Path) -> None:
    (alone,) = pool.run(1, followed, str(tmp_path / "alone"), "replicate=1", False)
    for rank in pool.run(2, followed, str(tmp_path / "shard"), "shard=2", True, timeout_seconds=50):
        for says, said, loss in [*alone, *rank]:
            assert says in said
            assert loss > 0
        for (_, _, one), (_, _, two) in zip(alone, rank, strict=False):
            assert two == pytest.approx(one, rel=1e-4)


def metric(logits: Tensor, text: Tensor) -> Tensor:
    return (logits.argmax(-1) == text).float().mean(1)


def evaluated(folder: str) -> str:
    with pytest.raises(UserError) as error:
        ls.train(
            recipe(evaluation=ls.Evaluation(data=TEXTS[:4], metrics={"right": ls.Mean(metric)})),
            run_dir=folder,
            plan="logits=chunked",
        )
    return str(error.value)


def test_a_metric_that_reads_the_logits_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    (said,) = pool.run(1, evaluated, str(tmp_path))
    assert "torch's argmax is called on the logits" in said


def of_each(logits: Tensor, text: Tensor) -> Tensor:
    """A metric: the loss of each sample."""
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), text[:, 1:], reduction="none")
    return losses.mean(1)


def trained_by_chunks(folder: str, plan: str) -> list[tuple[float, dict[str, float]]]:
    metrics = {"of each": ls.Mean(of_each)}
    changes = {
        "sequence": ls.Sequence(chunks=4),
        "loss": summed,
        "weight": numbers,
        "evaluation": ls.Evaluation(data=TEXTS[:9], metrics=metrics),
    }
    found = []
    for place, kind in enumerate((Language, partial(Language, tied=True))):
        given = recipe(model=kind, **changes)
        result = ls.train(given, run_dir=f"{folder}/{place}", plan=plan)
        found.append((result.loss, dict(result.metrics)))
    return found


def test_ranks_that_share_out_tokens_compute_the_chunks_of_their_own(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (whole,) = pool.run(1, trained_by_chunks, str(tmp_path / "whole"), "replicate=1")
    for number, plan in enumerate(("context=2", "context=2,numerics=bitwise")):
        folder = str(tmp_path / str(number))
        for rank in pool.run(2, trained_by_chunks, folder, f"{plan},logits=chunked"):
            for (loss, metrics), (expected, others) in zip(rank, whole, strict=True):
                assert loss == pytest.approx(expected, rel=1e-5), plan
                assert metrics == pytest.approx(others, rel=1e-5), plan


def profiled(folder: str) -> dict[str, int]:
    """The memory at the peak, by cause."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_PROFILE", "steps=1:2")
        ls.train(recipe(evaluation=None), run_dir=folder, plan="logits=chunked")
    (rank,) = json.loads((Path(folder) / "profile" / "memory.json").read_text())["ranks"]
    return {cause: max(sizes) for cause, sizes in rank["bytes_by_cause"].items()}


def test_a_profile_shows_chunked_logits(pool: WorkerPool, tmp_path: Path) -> None:
    (most,) = pool.run(1, profiled, str(tmp_path))
    assert most["chunked logits"] >= 4 * (CLASSES * FEATURES + CLASSES), "the head's gradients"
    assert not most["keys and values"]
