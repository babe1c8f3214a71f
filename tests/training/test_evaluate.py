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
from training.subjects import each_of, recipe, rows, squared_error, state_of

import lockstep as ls
from lockstep.base.errors import LossError
from lockstep.testing.pool import WorkerPool

WORLD_SIZES = (1, 3)
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


MEASURED = [(37, None), (37, 5), (37, 64), (5, 4), (7, 4)]
"""Samples, of which a rank may have none, and the evaluation's microbatch."""


def learned(run_dir: str) -> str:
    """How often it is measured does not change what is learned."""
    given = {"model": Classifier, "data": labelled(30, seed=2), "inputs": inputs, "loss": entropy}
    one, other = (
        ls.train(
            recipe(**given, evaluation=ls.Evaluation(data=labelled(9, seed=1), every=every)),
            run_dir=f"{run_dir}/{every}",
            plan="numerics=bitwise",
        ).fingerprint
        for every in (None, 1)
    )
    assert one == other
    return one


def noisy_each(run_dir: str) -> list[dict[str, float]]:
    """What a model measures that draws random numbers, with and without a hook that draws some."""
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


def of_recipe(run_dir: str, changes: dict[str, Any]) -> dict[str, float]:
    return ls.train(recipe(**changes), run_dir=run_dir).metrics


def evaluates(metric: Any, samples: int = 12, **changes: Any) -> dict[str, Any]:
    """Changes of a recipe by which it measures one metric, with a microbatch for each rank."""
    return {"evaluation": ls.Evaluation(data=rows(samples), metrics={"bad": metric}, **changes)}


def trained(run_dir: str) -> dict[str, Any]:
    return {
        "measured": each_of(measure, f"{run_dir}/measured", MEASURED),
        "learned": learned(f"{run_dir}/learned"),
        "noisy": noisy_each(f"{run_dir}/noisy"),
        "recipes": dict(
            zip(
                RECIPES,
                each_of(of_recipe, f"{run_dir}/recipes", [(each,) for each in RECIPES.values()]),
                strict=True,
            )
        ),
    }


@pytest.fixture(scope="module")
def found(
    pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, Any]]]:
    """What each rank measures, by the number of processes."""
    folder = tmp_path_factory.mktemp("runs")
    return {size: pool.run(size, trained, str(folder / str(size))) for size in WORLD_SIZES}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_each_sample_counts_once_whatever_the_ranks_and_microbatches(
    found: dict[int, list[dict[str, Any]]], world_size: int
) -> None:
    everyone = [rank["measured"] for rank in found[world_size]]
    for (samples, microbatch), *ranks in zip(MEASURED, *everyone, strict=True):
        for result, watch, (loss, accuracy, auc) in ranks:
            case, metrics = (samples, microbatch), result.metrics
            assert metrics == ranks[0][0].metrics == watch.seen[-1][2], case
            assert metrics["mean index"] == (samples - 1) / 2, case
            assert metrics["loss"] == pytest.approx(loss, rel=1e-5), case
            assert metrics["accuracy"] == accuracy, case
            assert metrics["area"] == pytest.approx(auc, abs=1e-9), case
            assert metrics["order"] == metrics["kind"] == 1.0, case
            assert len(watch.seen) == 2, case


def test_every_module_is_left_in_the_mode_it_was_in(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    names = [name for name, _ in Classifier().named_modules()]
    for rank in found[3]:
        _, watch, _ = rank["measured"][-1]
        assert [modes for modes, _, _ in watch.seen] == [[name != "body.1" for name in names]] * 2
        assert watch.model.calls[-4:] == [False, True] * 2


def test_what_is_learned_and_what_is_drawn_is_the_same_on_any_number_of_processes(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    ranks = [rank for everyone in found.values() for rank in everyone]
    assert len({rank["learned"] for rank in ranks}) == 1
    assert [rank["noisy"] for rank in ranks] == [ranks[0]["noisy"]] * len(ranks)
    first, second = ranks[0]["noisy"]
    assert first != second


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


class Metrics(ls.Hook):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def after_evaluation(self, run: Any, metrics: Any) -> None:
        self.seen.append(dict(metrics))


def with_labels(samples: int, *ignored: int) -> TensorDataset:
    """Features and labels, those of some samples to be ignored."""
    labels = torch.arange(samples) % 3
    labels[list(ignored)] = -100
    return TensorDataset(rows(samples).tensors[1], labels)


def first_of(batch: Batch) -> Tensor:
    return batch[0]


def entropy_of_labels(output: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(output, batch[1])


def all_losses(model: nn.Module, batch: Batch) -> dict[str, Any]:
    loss = squared_error(model, batch)
    return {"loss": loss, "twice": 2 * loss}


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


def one_value(model: nn.Module, batch: Batch) -> Tensor:
    return batch[0].reshape(())


def as_wide_as_the_largest(model: nn.Module, batch: Batch) -> Tensor:
    """As predictions are that are padded to the longest of their microbatch."""
    return torch.zeros(len(batch[0]), int(batch[0].max()) // 8 + 2)


def of_two_dtypes(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return batch[1], batch[0] if int(batch[0].max()) < 8 else batch[0].float()


def one_or_two(model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    return (batch[0],) if int(batch[0].max()) < 8 else (batch[0], batch[0])


def not_a_number(order: Tensor) -> float:
    return math.nan


ROWS, OF_4 = "one row per sample", "from a microbatch of 4 samples"
ONE = "a metric is one number; reduce it"
TOGETHER = "the rows of all samples are concatenated"
RECIPES: dict[str, dict[str, Any]] = {
    "two terms": {"loss": all_losses, "evaluation": ls.Evaluation(data=rows(9))},
    "terms in turn": {"loss": in_turn, **evaluates(ls.Mean(first), 14)},
    "one value of one sample": evaluates(ls.Mean(one_value), microbatch=1),
    "nan": evaluates(ls.Gathered(first, not_a_number)),
    "fewer terms": {"loss": now_and_then, **evaluates(ls.Mean(first), 14)},
    "one term or several": {"loss": one_or_several, **evaluates(ls.Mean(first), 14)},
    "a row too many": evaluates(ls.Gathered(a_row_too_many, nothing)),
    "a scalar": evaluates(ls.Gathered(a_scalar, nothing)),
    "a list": evaluates(ls.Gathered(a_list, nothing)),
    "nothing": evaluates(ls.Gathered(a_number, nothing)),
    "computed nothing": evaluates(ls.Gathered(first, no_value)),
    "computed a vector": evaluates(ls.Gathered(first, vector)),
    "a mean of means": evaluates(ls.Mean(a_mean)),
    "a mean of a number": evaluates(ls.Mean(a_number)),
    "widths": evaluates(ls.Gathered(as_wide_as_the_largest, nothing), 14),
    "dtypes": evaluates(ls.Gathered(of_two_dtypes, nothing), 14),
    "numbers of tensors": evaluates(ls.Gathered(one_or_two, nothing), 14),
}
FLOATS, INTEGERS = "float32 rows of shape", "int64 rows of shape ()"
REFUSED: dict[str, tuple[str, ...]] = {
    "fewer terms": (
        "LossError: evaluation, microbatch 1: the loss has terms ['a'] and had ['a', 'b'] before",
        "give one that does not apply as a zero, (output * 0).sum()",
    ),
    "one term or several": (
        "LossError: evaluation, microbatch 1: the loss has terms ['b', 'a'] and had ['loss']",
    ),
    "a row too many": ("DataError: metric 'bad' collected shape (5,)", OF_4, ROWS),
    "a scalar": ("DataError: metric 'bad' collected shape ()", OF_4),
    "a list": ("DataError: metric 'bad' collected a list", OF_4),
    "nothing": ("DataError: metric 'bad' collected a float", OF_4),
    "computed nothing": ("DataError: metric 'bad' is None (a NoneType)", "reduce it"),
    "computed a vector": ("DataError: metric 'bad' computed an array of shape (12,)", ONE),
    "a mean of means": (
        "DataError: metric 'bad' has one value for a microbatch of 4 samples",
        "return one value per sample: leave out .mean()",
    ),
    "a mean of a number": ("DataError: metric 'bad' has values 0.5 (a float)", "one a sample"),
    "widths": (
        f"DataError: metric 'bad' collected {FLOATS} (3,) from microbatch 2, and {FLOATS} (2,)"
        " from microbatch 0",
        TOGETHER,
        "pad them to one width",
    ),
    "dtypes": (
        f"DataError: metric 'bad' collected {FLOATS} (6,) and {FLOATS} () from microbatch 2",
        f"{FLOATS} (6,) and {INTEGERS} from microbatch 0",
        TOGETHER,
    ),
    "numbers of tensors": (
        f"DataError: metric 'bad' collected {INTEGERS} and {INTEGERS} from microbatch 2",
        f"and {INTEGERS} from",
    ),
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_terms_and_metrics_are_what_they_say_or_refused_on_all_ranks(
    found: dict[int, list[dict[str, Any]]], world_size: int
) -> None:
    for rank in found[world_size]:
        made = rank["recipes"]
        for name, words in REFUSED.items():
            assert made[name].startswith(words[0]), name
            assert all(each in made[name] for each in words), (name, made[name])
        two, turn = made["two terms"], made["terms in turn"]
        assert two["loss/twice"] == pytest.approx(2 * two["loss/loss"])
        assert two["loss"] == pytest.approx(3 * two["loss/loss"])
        assert turn["loss/b"] == pytest.approx(3 * turn["loss/a"], rel=1e-5)
        assert (turn["bad"], made["one value of one sample"]["bad"]) == (6.5, 5.5)
        assert math.isnan(made["nan"]["bad"])


def test_a_mean_over_tokens_that_are_not_ignored_is_refused_in_evaluation_too(
    tmp_path: Path,
) -> None:
    with pytest.raises(LossError) as caught:
        of_recipe(
            str(tmp_path),
            {
                "data": with_labels(30),
                "inputs": first_of,
                "loss": entropy_of_labels,
                "evaluation": ls.Evaluation(data=with_labels(9, 2)),
            },
        )
    assert str(caught.value).startswith(
        "term 'loss' of the loss is a plain scalar, and batch[1] holds the ignore index -100"
    )


def test_a_metric_that_is_nan_is_null_in_the_files(tmp_path: Path) -> None:
    of_recipe(str(tmp_path), RECIPES["nan"])
    assert '"evaluation/bad": null' in (tmp_path / "metrics.jsonl").read_text()
    assert '"bad": null' in (tmp_path / "result.json").read_text()
