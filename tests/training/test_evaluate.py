"""Evaluation: every sample counts exactly once, at any world size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from training.subjects import recipe, rows, squared_error, state_of

import lockstep as ls
from lockstep.base.errors import DataError, LossError
from lockstep.testing.pool import WorkerPool

WORLD_SIZES = (1, 2, 3)
Batch = Sequence[Tensor]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bool] = []
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 2)

    def train(self, mode: bool = True) -> Classifier:
        self.calls.append(mode)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def labelled(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, 4, generator=generator)
    labels = (features.sum(1) + torch.randn(samples, generator=generator) > 0).long()
    return TensorDataset(torch.arange(samples), features, labels)


def inputs(batch: Batch) -> Tensor:
    return batch[1]


def entropy(output: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(output, batch[2])


def index(output: Tensor, batch: Batch) -> Tensor:
    return batch[0]


def correct(output: Tensor, batch: Batch) -> Tensor:
    return output.argmax(1) == batch[2]


def scores(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return output[:, 1] - output[:, 0], batch[2]


def area(score: Tensor, label: Tensor) -> float:
    above = score[label == 1, None] - score[None, label == 0]
    return ((above.sign() + 1) / 2).double().mean().item()


def in_order(order: Tensor) -> float:
    return float(torch.equal(order, torch.arange(len(order))))


def kind(order: Tensor) -> float:
    return float(order.dtype is torch.int64 and order.device.type == "cpu")


class Watch(ls.Hook):
    """The modes of all modules after each evaluation, the model then, and its metrics. One module
    is kept in evaluation mode."""

    def on_start(self, run: Any) -> None:
        run.model.body[1].eval()
        self.model = run.model
        self.seen: list[tuple[list[bool], dict[str, Tensor], dict[str, float]]] = []

    def after_evaluation(self, run: Any, metrics: Any) -> None:
        self.seen.append(
            (
                [module.training for module in run.model.modules()],
                state_of(run.model),
                dict(metrics),
            )
        )


def measure(
    run_dir: str, samples: int, microbatch: int | None
) -> tuple[ls.Result, Watch, tuple[float, float, float]]:
    held_out = labelled(samples, seed=1)
    watch = Watch()
    metrics = {
        "mean index": ls.Mean(index),
        "accuracy": ls.Mean(correct),
        "area": ls.Gathered(scores, area),
        "order": ls.Gathered(index, in_order),
        "kind": ls.Gathered(index, kind),
    }
    given = recipe(
        model=Classifier,
        data=labelled(30, seed=2),
        inputs=inputs,
        loss=entropy,
        evaluation=ls.Evaluation(data=held_out, every=2, microbatch=microbatch, metrics=metrics),
        steps=3,
    )
    result = ls.train(given, run_dir=run_dir, hooks=[watch])
    model = Classifier()
    model.load_state_dict(watch.seen[-1][1])
    model.eval()
    with torch.no_grad():
        output = model(held_out.tensors[1])
    score, label = scores(output, held_out.tensors)
    return (
        result,
        watch,
        (
            float(entropy(output, held_out.tensors)),
            float(correct(output, held_out.tensors).double().mean()),
            area(score, label),
        ),
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("microbatch", [None, 5, 64])
def test_37_samples_count_once_each_whatever_the_ranks_and_microbatches(
    pool: WorkerPool, tmp_path: Path, world_size: int, microbatch: int | None
) -> None:
    everyone = pool.run(world_size, measure, str(tmp_path / "run"), 37, microbatch)
    for result, watch, (loss, accuracy, auc) in everyone:
        metrics = result.metrics
        assert metrics == everyone[0][0].metrics == watch.seen[-1][2]
        assert metrics["mean index"] == 18.0
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["accuracy"] == accuracy
        assert metrics["area"] == pytest.approx(auc, abs=1e-9)
        assert metrics["order"] == metrics["kind"] == 1.0
        assert len(watch.seen) == 2


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_may_have_no_sample(pool: WorkerPool, tmp_path: Path, world_size: int) -> None:
    for result, _, (loss, accuracy, auc) in pool.run(
        world_size, measure, str(tmp_path / "run"), 5, 4
    ):
        metrics = result.metrics
        assert (metrics["mean index"], metrics["order"], metrics["kind"]) == (2.0, 1.0, 1.0)
        assert (metrics["accuracy"], metrics["area"]) == (accuracy, auc)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)


def test_every_module_is_left_in_the_mode_it_was_in(pool: WorkerPool, tmp_path: Path) -> None:
    for _, watch, _ in pool.run(2, measure, str(tmp_path / "run"), 7, 4):
        names = [name for name, _ in Classifier().named_modules()]
        assert [modes for modes, _, _ in watch.seen] == [[name != "body.1" for name in names]] * 2
        assert watch.model.calls[-4:] == [False, True] * 2


def fingerprints(run_dir: str) -> list[str]:
    found = []
    for every in (None, 1):
        evaluation = ls.Evaluation(data=labelled(9, seed=1), every=every)
        given = recipe(
            model=Classifier,
            data=labelled(30, seed=2),
            inputs=inputs,
            loss=entropy,
            evaluation=evaluation,
            steps=3,
        )
        found.append(
            ls.train(given, run_dir=f"{run_dir}/{every}", plan="numerics=bitwise").fingerprint
        )
    return found


def test_how_often_it_is_measured_does_not_change_what_is_learned(
    pool: WorkerPool, tmp_path: Path
) -> None:
    assert (
        len(
            {
                fingerprint
                for found in pool.run(2, fingerprints, str(tmp_path))
                for fingerprint in found
            }
        )
        == 1
    )


class Noisy(nn.Module):
    """It draws from torch's and numpy's generators, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn(len(x), 1)) + float(np.random.rand())


class Draws(ls.Hook):
    def after_step(self, run: Any) -> None:
        torch.rand(run.context.world.rank + run.context.world.size)


def noisy(run_dir: str) -> list[dict[str, float]]:
    found = []
    for number, hooks in enumerate(([], [Draws()])):
        watch = Metrics()
        evaluation = ls.Evaluation(
            data=labelled(11, seed=1), every=1, metrics={"accuracy": ls.Mean(correct)}
        )
        given = recipe(
            model=Noisy,
            data=labelled(30, seed=2),
            inputs=inputs,
            loss=entropy,
            evaluation=evaluation,
        )
        ls.train(
            given, run_dir=f"{run_dir}/{number}", hooks=[*hooks, watch], plan="numerics=bitwise"
        )
        found.append(watch.seen)
    assert found[0] == found[1]
    return found[0]


class Metrics(ls.Hook):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def after_evaluation(self, run: Any, metrics: Any) -> None:
        self.seen.append(dict(metrics))


def test_a_model_that_draws_random_numbers_measures_the_same_on_any_number_of_processes(
    pool: WorkerPool, tmp_path: Path
) -> None:
    found = [
        seen for size in WORLD_SIZES for seen in pool.run(size, noisy, str(tmp_path / str(size)))
    ]
    assert all(seen == found[0] for seen in found)
    assert found[0][0] != found[0][1]


def with_ignored_labels(run_dir: str) -> str:
    labels = [torch.arange(30) % 3, torch.where(torch.arange(9) == 2, -100, torch.arange(9) % 3)]
    features = [rows(30).tensors[1], rows(9).tensors[1]]
    learned, held_out = (TensorDataset(x, y) for x, y in zip(features, labels, strict=True))
    given = recipe(
        data=learned,
        inputs=first_of,
        loss=entropy_of_labels,
        evaluation=ls.Evaluation(data=held_out),
    )
    try:
        ls.train(given, run_dir=run_dir)
    except LossError as error:
        return str(error)
    return "it was measured"


def first_of(batch: Batch) -> Tensor:
    return batch[0]


def entropy_of_labels(output: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(output, batch[1])


def test_a_mean_over_tokens_that_are_not_ignored_is_refused_in_evaluation_too(
    tmp_path: Path,
) -> None:
    assert with_ignored_labels(str(tmp_path / "run")).startswith(
        "term 'loss' of the loss is a plain scalar, and batch[1] holds the ignore index -100; a"
        " mean over tokens that are not ignored would"
    )


def all_losses(model: nn.Module, batch: Batch) -> dict[str, Any]:
    loss = squared_error(model, batch)
    return {"loss": loss, "twice": 2 * loss}


def two_losses(run_dir: str) -> dict[str, float]:
    return ls.train(
        recipe(loss=all_losses, evaluation=ls.Evaluation(data=rows(9))), run_dir=run_dir
    ).metrics


def test_the_loss_is_the_sum_of_all_terms_even_where_one_is_called_loss(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for metrics in pool.run(2, two_losses, str(tmp_path / "run")):
        assert metrics["loss/twice"] == pytest.approx(2 * metrics["loss/loss"])
        assert metrics["loss"] == pytest.approx(3 * metrics["loss/loss"])


def in_turn(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The order of the terms differs between microbatches."""
    loss = squared_error(model, batch)
    named = {"a": loss, "b": 3 * loss}
    return dict(reversed(named.items())) if int(batch[0][0]) % 8 else named


def now_and_then(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    named = in_turn(model, batch)
    if not model.training and int(batch[0][0]) >= 4:
        del named["b"]
    return named


def one_or_several(model: nn.Module, batch: Batch) -> Any:
    return (
        squared_error(model, batch)
        if model.training or int(batch[0][0]) < 4
        else in_turn(model, batch)
    )


def measure_terms(run_dir: str, loss: Any) -> dict[str, float] | str:
    evaluation = ls.Evaluation(data=rows(14), metrics={"index": ls.Mean(first)})
    try:
        return ls.train(recipe(loss=loss, evaluation=evaluation), run_dir=run_dir).metrics
    except LossError as error:
        return str(error)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_terms_are_told_apart_by_name_whatever_their_order(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    for metrics in pool.run(world_size, measure_terms, str(tmp_path / "run"), in_turn):
        assert metrics["loss/b"] == pytest.approx(3 * metrics["loss/a"], rel=1e-5)
        assert metrics["index"] == 6.5


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("loss", "terms", "before"),
    [(now_and_then, ["a"], ["a", "b"]), (one_or_several, ["b", "a"], ["loss"])],
)
def test_other_terms_in_another_microbatch_are_refused_on_all_ranks(
    pool: WorkerPool,
    tmp_path: Path,
    world_size: int,
    loss: Any,
    terms: list[str],
    before: list[str],
) -> None:
    for text in pool.run(world_size, measure_terms, str(tmp_path / "run"), loss):
        assert (
            text
            == f"evaluation, microbatch 1: the loss has terms {terms} and had {before} before; it"
            " must have the same terms for every microbatch: give one that does not apply as a"
            " zero, (output * 0).sum()"
        )


def a_row_too_many(model: nn.Module, batch: Batch) -> tuple[Tensor]:
    return (torch.zeros(len(batch[0]) + 1),)


def a_scalar(model: nn.Module, batch: Batch) -> tuple[Tensor]:
    return (torch.zeros(()),)


def a_list(model: nn.Module, batch: Batch) -> tuple[Any]:
    return ([0.0] * len(batch[0]),)


def a_number(model: nn.Module, batch: Batch) -> Any:
    return 0.5


def a_mean(model: nn.Module, batch: Batch) -> Tensor:
    return batch[1].mean()


def first(model: nn.Module, batch: Batch) -> Tensor:
    return batch[0]


def no_value(order: Tensor) -> Any:
    return None


def vector(order: Tensor) -> Any:
    return order


def nothing(*_: Any) -> float:
    return 0.0


BAD_METRICS: dict[str, tuple[Any, str]] = {
    "a row too many": (
        ls.Gathered(a_row_too_many, nothing),
        (
            "metric 'bad' collected shape (5,) from a microbatch of 4 samples; each tensor has one"
            " row a sample"
        ),
    ),
    "a scalar": (
        ls.Gathered(a_scalar, nothing),
        "metric 'bad' collected shape () from a microbatch of 4 samples",
    ),
    "a list": (
        ls.Gathered(a_list, nothing),
        "metric 'bad' collected a list from a microbatch of 4 samples",
    ),
    "nothing": (
        ls.Gathered(a_number, nothing),
        "metric 'bad' collected a float from a microbatch of 4 samples",
    ),
    "computed nothing": (
        ls.Gathered(first, no_value),
        "metric 'bad' is None (a NoneType); a metric is a single number; reduce it",
    ),
    "computed a vector": (
        ls.Gathered(first, vector),
        "metric 'bad' computed an array of shape (8,); a metric is one number; reduce it",
    ),
    "a mean of means": (
        ls.Mean(a_mean),
        (
            "metric 'bad' has one value for a microbatch of 4 samples; an ls.Mean divides the sum"
            " of the values by their number, and would take a mean of means; return one value a"
            " sample: leave out .mean()"
        ),
    ),
    "a mean of a number": (
        ls.Mean(a_number),
        "metric 'bad' has values 0.5 (a float); a Mean's values are a tensor, one a sample",
    ),
}


def evaluate_badly(run_dir: str, metric: Any) -> str:
    try:
        ls.train(
            recipe(evaluation=ls.Evaluation(data=rows(8), metrics={"bad": metric})), run_dir=run_dir
        )
    except DataError as error:
        return str(error)
    return "it was measured"


@pytest.mark.parametrize("name", BAD_METRICS)
def test_a_metric_that_is_not_what_it_says_is_refused(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    metric, message = BAD_METRICS[name]
    assert all(
        text.startswith(message)
        for text in pool.run(2, evaluate_badly, str(tmp_path / "run"), metric)
    )


def one_value(model: nn.Module, batch: Batch) -> Tensor:
    return batch[0].reshape(())


def measured_one_by_one(run_dir: str) -> float:
    evaluation = ls.Evaluation(data=rows(8), metrics={"index": ls.Mean(one_value)}, microbatch=1)
    return ls.train(recipe(evaluation=evaluation), run_dir=run_dir).metrics["index"]


def test_a_mean_may_be_one_value_where_the_microbatch_is_one_sample(tmp_path: Path) -> None:
    assert measured_one_by_one(str(tmp_path / "run")) == 3.5


def as_wide_as_the_largest(model: nn.Module, batch: Batch) -> Tensor:
    """As predictions are that are padded to the longest of their microbatch."""
    return torch.zeros(len(batch[0]), int(batch[0].max()) // 8 + 2)


def of_two_dtypes(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return batch[1], batch[0] if int(batch[0].max()) < 8 else batch[0].float()


def one_or_two(model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    return (batch[0],) if int(batch[0].max()) < 8 else (batch[0], batch[0])


RAGGED: dict[str, tuple[Any, str]] = {
    "widths": (
        as_wide_as_the_largest,
        (
            "metric 'bad' collected float32 rows of shape (3,) from microbatch 2, and float32 rows"
            " of shape (2,) from microbatch 0; the rows of all samples are concatenated, so they"
            " must have one dtype and one shape: pad them to one width"
        ),
    ),
    "dtypes": (
        of_two_dtypes,
        (
            "metric 'bad' collected float32 rows of shape (6,) and float32 rows of shape () from"
            " microbatch 2, and float32 rows of shape (6,) and int64 rows of shape () from"
            " microbatch 0; the rows of all samples are concatenated"
        ),
    ),
    "numbers of tensors": (
        one_or_two,
        (
            "metric 'bad' collected int64 rows of shape () and int64 rows of shape () from"
            " microbatch 2, and int64 rows of shape () from"
        ),
    ),
}


def evaluate_ragged(run_dir: str, collect: Any) -> str:
    try:
        ls.train(
            recipe(
                evaluation=ls.Evaluation(
                    data=rows(14), metrics={"bad": ls.Gathered(collect, nothing)}
                )
            ),
            run_dir=run_dir,
        )
    except DataError as error:
        return str(error)
    return "it was measured"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", RAGGED)
def test_rows_that_do_not_go_together_are_refused_on_all_ranks(
    pool: WorkerPool, tmp_path: Path, name: str, world_size: int
) -> None:
    collect, message = RAGGED[name]
    assert all(
        text.startswith(message)
        for text in pool.run(world_size, evaluate_ragged, str(tmp_path / "run"), collect)
    )


def not_a_number(order: Tensor) -> float:
    return math.nan


def without_a_value(run_dir: str) -> float:
    evaluation = ls.Evaluation(data=rows(8), metrics={"area": ls.Gathered(first, not_a_number)})
    return ls.train(recipe(evaluation=evaluation), run_dir=run_dir).metrics["area"]


def test_a_metric_may_be_nan_and_is_null_in_the_files(pool: WorkerPool, tmp_path: Path) -> None:
    assert all(map(math.isnan, pool.run(2, without_a_value, str(tmp_path / "run"))))
    assert '"evaluation/area": null' in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"area": null' in (tmp_path / "run" / "result.json").read_text()
