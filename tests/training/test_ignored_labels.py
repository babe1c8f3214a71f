"""A plain mean over labels that the loss itself ignores, if microbatches ignore unequally many."""

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
from training.subjects import each_of, samples_at, sgd

import lockstep as ls
from lockstep.base.errors import LossError
from lockstep.testing.pool import WorkerPool
from lockstep.training.loss import counted_labels

DEPENDS = "loss-depends-on-microbatches"
WORDS, TOKENS, SAMPLES, PADDING = 7, 6, 32, 0


def texts(first: int) -> TensorDataset:
    """Texts; from position `first` in the order of the samples on, every third one is short."""
    text = torch.randint(1, WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    for sample in samples_at(first, SAMPLES, of=SAMPLES)[::3]:
        text[sample, 3:] = PADDING
    return TensorDataset(text)


def next_words(batch: Sequence[Tensor]) -> Tensor:
    labels = batch[0].roll(-1, 1)
    labels[:, -1] = PADDING
    return labels.masked_fill(labels == PADDING, -100)


def mean(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), next_words(batch).flatten())


def with_penalty(output: Tensor, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    return {"words": mean(output, batch) + 0.1 * output.square().mean(), "size": output.mean()}


def total(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    labels = next_words(batch)
    return ls.Sum(F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"))


def by_class(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), next_words(batch))


def cut(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    """Counts equally many labels of each sample, and another number in another microbatch."""
    labels = next_words(batch)
    labels[:, 2 + int(batch[0].sum()) % 3 :] = -100
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


LOSSES: list[tuple[Any, Any]] = [
    (mean, None),
    (with_penalty, None),
    (by_class, None),
    (total, lambda batch: (next_words(batch) != -100).sum()),
    (cut, None),
]


def trained(run_dir: str, plan: str, first: int, place: int) -> str:
    loss, weight = LOSSES[place]
    given = ls.Recipe(
        model=lambda: nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)),
        data=texts(first),
        inputs=lambda batch: batch[0],
        loss=loss,
        weight=weight,
        optimizer=sgd,
        global_batch=8,
        microbatch=2,
        steps=4,
    )
    result = ls.train(given, run_dir=run_dir, plan=plan)
    return " ".join(event.name for event in result.events if event.name.startswith("loss-"))


def each(run_dir: str, plan: str, first: int) -> list[Any]:
    return each_of(trained, run_dir, [(plan, first, place) for place in range(4)])


@pytest.mark.parametrize(("first", "step"), [(18, 2), (10, 1), (2, 0)])
def test_it_is_refused_where_the_proportion_changes(
    pool: WorkerPool, tmp_path: Path, first: int, step: int
) -> None:
    """On one process, and on two, of which one alone may see it."""
    *means, of_sum = each(str(tmp_path / "one"), "replicate=1", first)
    assert of_sum == ""
    with pytest.raises(LossError) as caught:
        pool.run(2, trained, str(tmp_path / "two"), "replicate=2", first, 0)
    for name, text in zip(("loss", "words", "loss", "loss"), [*means, caught.value], strict=True):
        assert f"after step {step}, microbatch" in str(text)
        assert f"term {name!r} of the loss is a mean over the labels that are not" in str(text)
        assert "83.3%" in str(text)
    remedied = pool.run(2, trained, str(tmp_path / "sum"), "replicate=2", first, 3)
    assert remedied == ["", ""]


def test_it_is_accepted_where_each_sample_ignores_equally_many(
    pool: WorkerPool, tmp_path: Path
) -> None:
    assert each(str(tmp_path / "one"), "replicate=1", SAMPLES) == [""] * 4
    assert trained(str(tmp_path / "cut"), "replicate=1", SAMPLES, 4) in ("", DEPENDS)
    assert pool.run(2, each, str(tmp_path / "two"), "pipeline=2", SAMPLES) == [[""] * 4] * 2


LABELS = torch.tensor([0, 1, 2, -100])
OUTPUT = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda: F.cross_entropy(OUTPUT, LABELS), [(0.75, False)]),
        (
            lambda: F.nll_loss(OUTPUT, LABELS) + F.cross_entropy(OUTPUT, LABELS),
            [(0.75, False), (0.75, False)],
        ),
        (lambda: F.cross_entropy(OUTPUT, LABELS).reshape(1), [(0.75, False)]),
        (lambda: sum([F.cross_entropy(OUTPUT, LABELS)] * 2000), [(0.75, False)]),
        (lambda: F.cross_entropy(OUTPUT, LABELS.clamp(min=0)), [(1.0, True)]),
        (lambda: F.cross_entropy(OUTPUT, LABELS.flip(0)[[0, 1, 0, 1]]), [(0.5, True)]),
        (lambda: F.cross_entropy(OUTPUT, LABELS.clamp(min=0), ignore_index=0), None),
        (lambda: F.cross_entropy(OUTPUT, LABELS, weight=torch.ones(3)), None),
        (lambda: F.cross_entropy(OUTPUT, LABELS) * (LABELS != -100).sum() / 4, None),
        (lambda: F.cross_entropy(OUTPUT, LABELS, reduction="sum"), None),
        (lambda: F.cross_entropy(OUTPUT, LABELS, reduction="none").mean(), None),
        (lambda: OUTPUT.mean(), None),
        (partial(torch.zeros, ()), None),
        (lambda: ls.Sum(F.cross_entropy(OUTPUT, LABELS)), None),
    ],
)
def test_the_proportion_of_labels_that_a_mean_counts(loss: Any, expected: Any) -> None:
    assert counted_labels(loss(), 2) == ({} if expected is None else {"loss": expected})
