"""Samples are counted by what a batch holds: a collate function may leave some out, pack or repeat
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from training.subjects import each_of

import lockstep as ls
from lockstep.base.errors import LossError
from lockstep.testing.pool import WorkerPool
from lockstep.training.loss import batch_rows, rows_per_sample

SAMPLES = 64
KEPT = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(1)) > 0.3
Y = torch.arange(SAMPLES).float()[:, None] / SAMPLES
X = torch.cat([Y, 1 - Y, Y.square()], dim=1)


@dataclass
class Fields:
    x: Tensor
    name: str = "fields"


def rows(count: int, *more: int) -> Tensor:
    return torch.zeros(count, *more)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (rows(8, 3), 8),
        ([rows(8, 3), rows(8)], 8),
        ([rows(6, 8), rows(6)], 6),
        ({"x": rows(6, 3), "y": rows(6)}, 6),
        ({"x": np.zeros((6, 3)), "temperature": torch.ones(())}, 6),
        (((rows(16, 3), rows(16, 3)), rows(16)), 16),
        ((rows(150, 3), rows(2, 300), rows(8)), 8),  # nodes, edges, a label of each graph
        ((rows(150, 3), rows(2, 300)), -1),
        # images of any size, and their boxes
        (([rows(3, 5, 7)] * 8, [{"boxes": rows(n, 4)} for n in range(8)]), 8),
        (([rows(3, 5, 7)] * 6, [{"boxes": rows(n, 4)} for n in range(6)]), 6),
        ([{"x": rows(3, 4)}] * 6, 6),
        (["a text"] * 6, 6),
        ([rows(1, 3), rows(1)], 1),
        ([rows(7, 3), rows(5, 3)] * 4, 8),
        (Fields(rows(6, 3)), 6),
        (range(8), None),
        (object(), None),
        (torch.ones(()), None),
    ],
)
def test_the_samples_of_a_batch_are_its_rows_or_the_members_of_its_lists(
    batch: Any, expected: int | None
) -> None:
    assert batch_rows(batch, 8) == expected


@pytest.mark.parametrize(
    ("batch", "expected"), [(rows(8), 1), ([rows(8), rows(3)], 1), (rows(16), 2), (object(), 1)]
)
def test_a_scalar_is_taken_for_a_mean_over_the_samples_if_each_has_as_many_rows(
    batch: Any, expected: int
) -> None:
    assert rows_per_sample("loss", batch, 8) == expected


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (rows(6), "has 6 rows"),
        (rows(0, 3), "has 0 rows"),
        ((rows(9), rows(5)), "has nothing with one row per sample"),
    ],
)
def test_else_it_is_refused(batch: Any, found: str) -> None:
    with pytest.raises(LossError) as caught:
        rows_per_sample("ce", batch, 8)
    assert str(caught.value).startswith(
        "term 'ce' of the loss is a plain scalar, the mean over this microbatch's samples, and the"
        f" batch {found}"
    )


class Readable(Dataset[Any]):
    """Some samples are None: they cannot be read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return (X[index], Y[index]) if KEPT[index] else None


def readable(samples: list[Any]) -> list[Tensor]:
    return [
        torch.stack(part)
        for part in zip(*(sample for sample in samples if sample is not None), strict=True)
    ]


def packed(samples: list[Any]) -> list[Tensor]:
    return [part[None] for part in readable(samples)]


def repeated(samples: list[Any]) -> list[Tensor]:
    return [
        part.repeat_interleave(2, dim=0)
        for part in readable([sample or (X[0], Y[0]) for sample in samples])
    ]


def unequally_repeated(samples: list[Any]) -> list[Tensor]:
    x, y = readable([sample or (X[0], Y[0]) for sample in samples])
    times = 2 if float(y[0]) < 0.5 else 3
    return [x.repeat(times, 1), y.repeat(times, 1)]


def mean(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[1]).square().mean()


def total(output: Tensor, batch: Any) -> ls.Sum:
    return ls.Sum(mean(output, batch) * number(batch))


def known_later(output: Tensor, batch: Any) -> ls.Loss:
    return ls.Loss(mean(output, batch) * number(batch), number(batch))


def number(batch: Any) -> int:
    return batch[1].numel()


def train(
    run_dir: str, collate: Callable[..., Any], loss: Callable[..., Any], weight: Any, plan: str
) -> Any:
    given = ls.Recipe(
        model=lambda: nn.Linear(3, 1),
        data=Readable(),
        collate=collate,
        inputs=lambda batch: batch[0],
        loss=loss,
        weight=weight,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch=64,
        microbatch=8,
        steps=1,
        evaluation=ls.Evaluation(
            data=Readable(), collate=collate, metrics={"error": ls.Mean(squared)}
        ),
    )
    result = ls.train(given, run_dir=run_dir, plan=f"{plan},numerics=bitwise")
    return result.loss, result.metrics, result.fingerprint


def squared(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[1]).square()


TRAININGS: dict[str, tuple[Any, ...]] = {
    "readable": (readable, mean, None),
    "packed": (packed, mean, None),
    "unequally": (unequally_repeated, mean, None),
    "kept": (readable, total, number),
    "kept, known later": (readable, known_later, None),
    "whole": (packed, total, number),
    "whole, known later": (packed, known_later, None),
    "views": (repeated, mean, None),
}
REFUSED = {
    "readable": " rows for 8 samples",
    "packed": "has 1 rows for 8 samples",
    "unequally": "rows for each sample and had",
}


def trained(run_dir: str, plan: str) -> dict[str, Any]:
    """All trainings, without what only one rank finds, while others wait for its shards."""
    rows_of_table = {
        name: (*given, plan)
        for name, given in TRAININGS.items()
        if name != "unequally" or plan != "shard=2"
    }
    return dict(
        zip(rows_of_table, each_of(train, f"{run_dir}/{plan}", rows_of_table.values()), strict=True)
    )


def under_each(run_dir: str, plans: list[str]) -> dict[str, dict[str, Any]]:
    return {plan: trained(run_dir, plan) for plan in plans}


def test_a_mean_over_what_collate_has_kept_is_refused_and_the_remedies_are_exact(
    pool: WorkerPool, tmp_path: Path
) -> None:
    alone = under_each(str(tmp_path), ["replicate=1"])
    one, _ = pool.run(2, under_each, str(tmp_path), ["replicate=2", "shard=2"])
    for plan, found in (alone | one).items():
        for name, words in REFUSED.items():
            assert words in found.get(name, words), (plan, name)
            assert found.get(name, "LossError").startswith("LossError"), (plan, name)
        for name in ("kept", "whole"):
            loss, metrics, _ = found[name]
            again, measured, _ = found[f"{name}, known later"]
            assert again == pytest.approx(loss, rel=1e-6), (plan, name)
            assert metrics["loss"] == pytest.approx(metrics["error"], rel=1e-6), (plan, name)
            assert measured["loss"] == pytest.approx(metrics["loss"], rel=1e-5), (plan, name)
            assert found[name] == alone["replicate=1"][name], (plan, name)
        views = found["views"][1]
        assert views["loss"] == pytest.approx(views["error"], rel=1e-6), plan
    of_all = train_in_one_microbatch(str(tmp_path / "one"))
    assert alone["replicate=1"]["kept"][0] == pytest.approx(of_all, rel=1e-6), (
        "the loss of what was kept is the mean over all of it"
    )


def train_in_one_microbatch(run_dir: str) -> float:
    size = int(KEPT.sum())
    given = ls.Recipe(
        model=lambda: nn.Linear(3, 1),
        data=torch.utils.data.TensorDataset(X[KEPT], Y[KEPT]),
        inputs=lambda batch: batch[0],
        loss=mean,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch=size,
        microbatch=size,
        steps=1,
    )
    return ls.train(given, run_dir=run_dir).loss
