"""What a loss and its weight may be, what it comes to, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_files
import torch
from torch import Tensor, nn
from training.subjects import each_of, network, recipe, rows, same, samples_at, squared_error

import lockstep as ls
from lockstep.base.errors import LossError
from lockstep.testing.pool import WorkerPool
from lockstep.training.loss import Weights, contribution, measured, weights_of

W = torch.ones((), requires_grad=True)


def read(loss: Any, weights: Weights | None = None, batch: Any = None) -> Any:
    prescale = torch.tensor(4.0, dtype=torch.float64)
    return contribution(
        loss, samples=2, step_samples=8, batch=batch, weights=weights, prescale=prescale
    )


def value_and_gradient(loss: Any, weights: Weights | None = None) -> tuple[float, float]:
    W.grad = None
    part = read(loss, weights)
    part.total.backward(part.grad_output)
    return float(part.value), float(W.grad)


@pytest.mark.parametrize(
    ("loss", "weights", "expected"),
    [
        (lambda: 3 * W, None, (3 * 2 / 8, 3 * 2 / 8)),
        (lambda: (3 * W).reshape(1, 1), None, (3 * 2 / 8, 3 * 2 / 8)),
        (lambda: {"a": 3 * W}, None, (3 * 2 / 8, 3 * 2 / 8)),
        (lambda: ls.Sum(3 * W), {"loss": 5.0}, (3 / 5, 3 / 5)),
        (
            lambda: {"a": ls.Sum(3 * W), "b": ls.Sum(7 * W), "c": W},
            {"a": 5.0, "b": 2.0},
            (3 / 5 + 7 / 2 + 2 / 8, 3 / 5 + 7 / 2 + 2 / 8),
        ),
        (lambda: ls.Loss(3 * W, 2), None, (3, 3 / 4)),
        (lambda: ls.Loss(3 * W, torch.tensor([2])), None, (3, 3 / 4)),
    ],
)
def test_the_value_and_the_gradient_are_this_microbatchs_part_of_the_step(
    loss: Callable[[], Any], weights: Weights | None, expected: tuple[float, float]
) -> None:
    assert value_and_gradient(loss(), weights) == pytest.approx(expected)


def test_the_weight_of_a_loss_is_taken_as_a_scalar_without_gradient() -> None:
    weight = read(ls.Loss(3 * W, (2 * W).reshape(1))).weight
    assert float(weight) == 2.0
    assert weight.shape == ()
    assert not weight.requires_grad


TERM = "term 'loss' of the loss "
SCALAR = f"{TERM}is a plain scalar, "
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a number": (
        lambda: 3.5,
        f"{TERM}is 3.5 (a float); it must be a scalar tensor with a gradient: do not call .item()"
        " or float() on it",
    ),
    "nothing": (lambda: None, f"{TERM}is None (a NoneType); it must be a scalar tensor"),
    "not a scalar": (
        lambda: W * torch.ones(3, 2),
        f"{TERM}has shape (3, 2); it must be a scalar; take its mean() if it has one value per"
        " sample, or return ls.Sum of its sum() with Recipe.weight",
    ),
    "of no elements": (
        lambda: W * torch.ones(0),
        f"{TERM}has shape (0,); it must be a scalar",
    ),
    "without a gradient": (
        lambda: (W * 2).detach(),
        f"{TERM}has no gradient; it must depend on the model's parameters through differentiable"
        " operations: look for",
    ),
    "a term without a gradient": (
        lambda: {"a": W, "b": torch.ones(())},
        "term 'b' of the loss has no gradient; it must depend on the model's parameters",
    ),
    "no terms": (
        dict,
        "the loss is an empty dict; give it one term at least, or return the loss itself",
    ),
    "a Loss as a term": (
        lambda: {"a": ls.Loss(W, 1)},
        "term 'a' of the loss is an ls.Loss; several terms have several denominators, which must be"
        " known before the forward; return {name: ls.Sum(total)} and give Recipe.weight = batch ->"
        " {name: denominator}",
    ),
    "a Sum without a weight": (
        lambda: ls.Sum(W),
        f"{TERM}is an ls.Sum, and there is no weight to divide it by; give Recipe.weight = batch ->"
        " its denominator, or return ls.Loss(total, weight)",
    ),
    "a scalar with a weight": (
        lambda: W,
        f"{SCALAR}the mean over this microbatch's samples, and Recipe.weight gives it another"
        " denominator; return ls.Sum(total), the sum over what the weight counts, or drop the"
        " weight",
    ),
    "a Loss with a weight": (
        lambda: ls.Loss(W, 1),
        "the loss is an ls.Loss, which brings its own weight, and Recipe.weight is given too;"
        " return ls.Sum, or drop the weight",
    ),
    "a weight that is no scalar": (
        lambda: ls.Loss(W, torch.ones(2)),
        "the weight of ls.Loss has shape (2,); it must be a number or a scalar tensor",
    ),
    "a weight that is nothing": (
        lambda: ls.Loss(W, None),  # type: ignore[arg-type]
        "the weight of term 'loss' is a NoneType; it must be a number or a scalar tensor: the"
        " denominator of the term in this microbatch",
    ),
    "a weight in words": (
        lambda: ls.Loss(W, "3"),  # type: ignore[arg-type]
        "the weight of term 'loss' is a str; it must be a number",
    ),
    "a number for a name": (
        lambda: {"a": ls.Sum(W), 0: ls.Sum(W)},
        "the loss has a term named 0 (a int); a name is text, under which the term is recorded;"
        " name it '0', in the loss and in the weight",
    ),
    "a complex number": (
        lambda: W * (1 + 1j),
        f"{TERM}is complex (torch.complex64); only a real number can be minimized; take its .abs()"
        " or its .real",
    ),
    "a Sum that no weight goes with": (
        lambda: {"a": ls.Sum(W), "b": ls.Sum(W)},
        "the loss has terms ['a', 'b'] and the weight has ['a']; ['b'] is not a Sum in one and a"
        " weight in the other; a weight goes with each ls.Sum of the loss, by the same name",
    ),
    "a weight that no Sum goes with": (
        lambda: {"a": ls.Sum(W)},
        "the loss has terms ['a'] and the weight has ['a', 'c']; ['c'] is not a Sum in one and a"
        " weight in the other",
    ),
    "one Sum with weights by name": (
        lambda: ls.Sum(W),
        "the loss has terms ['loss'] and the weight has ['entropy'];",
    ),
    "a scalar with weights by name": (
        lambda: W,
        "the loss has terms ['loss'] and the weight has ['entropy'];",
    ),
    "a scalar where labels are ignored": (
        lambda: W,
        f"{SCALAR}and batch['labels'][0] holds the ignore index -100; a mean over tokens that are"
        " not ignored would be weighted as a mean over samples; return ls.Sum(total) with"
        " Recipe.weight = batch -> (batch['labels'][0] != -100).sum(), or ls.Loss(total, weight);"
        " where batch['labels'][0] is no label, return ls.Sum(loss * n) with Recipe.weight = batch"
        " -> n, the samples of the microbatch",
    ),
}
WEIGHTS: dict[str, Weights] = {
    "a scalar with a weight": {"loss": 2.0},
    "a Loss with a weight": {"loss": 2.0},
    "a number for a name": {"a": 1.0},
    "a Sum that no weight goes with": {"a": 2.0},
    "a weight that no Sum goes with": {"a": 2.0, "c": 1.0},
    "one Sum with weights by name": {"entropy": 2.0},
    "a scalar with weights by name": {"entropy": 2.0},
}
BATCHES = {
    "a scalar where labels are ignored": {
        "x": torch.zeros(2),
        "labels": [torch.tensor([1, -100])],
    }
}


def test_what_is_no_loss_is_refused_in_training_and_evaluation_with_the_same_text() -> None:
    for name, (loss, message) in REFUSED.items():
        weights, batch = WEIGHTS.get(name), BATCHES.get(name)
        with pytest.raises(LossError) as caught:
            read(loss(), weights, batch)
        assert str(caught.value).startswith(message), name
        if "without a gradient" not in name:
            with pytest.raises(LossError) as caught:
                measured(loss(), samples=2, batch=batch, weights=weights)
            assert str(caught.value).startswith(message), name


def test_other_negative_numbers_in_a_batch_are_not_taken_for_ignored_labels() -> None:
    batch = (
        torch.tensor([-1, -101]),
        torch.tensor([-100.0]),
        {"empty": torch.zeros(0, dtype=torch.int64)},
    )
    assert float(read(W, None, batch).value) == 0.25


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (3, {"loss": 3.0}),
        (2.5, {"loss": 2.5}),
        (torch.tensor(4), {"loss": 4.0}),
        (torch.tensor([4.5]), {"loss": 4.5}),
        (np.int64(5), {"loss": 5.0}),
        (np.float32(0.5), {"loss": 0.5}),
        ({"a": 1, "b": torch.tensor(0)}, {"a": 1.0, "b": 0.0}),
    ],
)
def test_a_weight_is_a_number_or_numbers_by_name(raw: Any, expected: Weights) -> None:
    assert weights_of(raw) == expected


def test_what_is_no_weight_is_refused() -> None:
    weight = "the weight of term 'loss' is "
    for raw, message in (
        (-1, f"{weight}-1.0; it counts what the term sums over and is finite and not negative"),
        (
            {"a": 1, "b": float("nan")},
            "the weight of term 'b' is nan; it counts what the term sums over",
        ),
        (torch.tensor(float("inf")), f"{weight}inf; it counts"),
        (
            torch.ones(2),
            f"{weight}of shape (2,); it must be a number or a scalar tensor: the denominator of the term"
            " in this microbatch",
        ),
        ("3", f"{weight}a str; it must be a number or a scalar tensor"),
        (None, f"{weight}a NoneType; it must be a number"),
        (True, f"{weight}a bool; it must be a number"),
        (
            {0: 1.0},
            "the weight has a term named 0 (a int); a name is text, under which the term is"
            " recorded; name it '0', in the loss and",
        ),
    ):
        with pytest.raises(LossError) as caught:
            weights_of(raw)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("loss", "weights", "expected"),
    [
        (lambda: 3 * W, None, {"loss": (6.0, 2.0)}),
        (lambda: ls.Sum(3 * W), {"loss": 5.0}, {"loss": (3.0, 5.0)}),
        (lambda: ls.Loss(3 * W, torch.tensor([5])), None, {"loss": (3.0, 5.0)}),
        (
            lambda: {"a": ls.Sum(3 * W), "b": 7 * W.detach()},
            {"a": 5.0},
            {"loss/a": (3.0, 5.0), "loss/b": (14.0, 2.0)},
        ),
    ],
)
def test_in_an_evaluation_each_term_is_a_total_and_a_weight(
    loss: Callable[[], Any], weights: Weights | None, expected: Any
) -> None:
    assert measured(loss(), samples=2, batch=None, weights=weights) == expected


Batch = Sequence[Tensor]


def parts(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    output = model(batch[1])
    return (output - batch[2]).abs().sum(), output.square().sum()


def two_terms(model: nn.Module, batch: Batch) -> dict[str, Any]:
    near, size = parts(model, batch)
    return {"near": ls.Sum(near), "size": ls.Sum(size), "mean": squared_error(model, batch)}


def two_weights(batch: Batch) -> dict[str, Any]:
    return {"near": int((batch[2] > 0).sum()), "size": (batch[0] % 3).sum()}


def one_loss(model: nn.Module, batch: Batch) -> ls.Loss:
    return ls.Loss(parts(model, batch)[0], (batch[0] % 5).sum())


def from_output(output: Tensor, batch: Batch) -> ls.Sum:
    return ls.Sum((output - batch[2]).abs().sum())


def weight_of_output(batch: Batch) -> Tensor:
    return (batch[0] % 5).sum()


def inputs(batch: Batch) -> dict[str, Tensor]:
    return {"input": batch[1]}


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


class First(ls.Hook):
    def on_start(self, run: Any) -> None:
        self.state = {name: value.clone() for name, value in run.model.state_dict().items()}


LOSSES: dict[str, dict[str, Any]] = {
    "terms": {"loss": two_terms, "weight": two_weights},
    "a loss": {"loss": one_loss},
    "a sum of the output": {"loss": from_output, "weight": weight_of_output, "inputs": inputs},
    "a mean": {"loss": squared_error},
}


def losses(run_dir: str) -> dict[str, tuple[float, dict[str, float], dict[str, Tensor]]]:
    found = {}
    evaluation = ls.Evaluation(data=rows(11, seed=8))
    for name, changes in LOSSES.items():
        first = First()
        given = recipe(optimizer=frozen, global_batch=14, steps=2, evaluation=evaluation, **changes)
        result = ls.train(given, run_dir=f"{run_dir}/{name}", hooks=[first], log_every=1)
        found[name] = (result.loss, result.metrics, first.state)
    return found


def by_hand(model: nn.Module, batch: Batch) -> dict[str, float]:
    """The losses over a whole batch at once, in float64."""
    near, size = parts(model, batch)
    weights = two_weights(batch)
    mean = squared_error(model, batch)
    terms = {"near": near / weights["near"], "size": size / weights["size"], "mean": mean}
    each = near / weight_of_output(batch)
    values = {
        "terms": sum(terms.values()),
        **terms,
        "a loss": each,
        "a sum of the output": each,
        "a mean": mean,
    }
    return {name: value.item() for name, value in values.items()}


@pytest.mark.parametrize("world_size", [1, 3])
def test_losses_in_training_and_evaluation_are_those_of_hand_arithmetic(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    everyone = pool.run(world_size, losses, str(tmp_path))
    assert same(everyone, [everyone[0]] * world_size)
    chosen = samples_at(14, 28, of=48)
    for name, (loss, metrics, state) in everyone[0].items():
        model = network()
        model.load_state_dict(state)
        model.double()
        trained, measured = (
            by_hand(model, [tensor[picked].double() for tensor in data.tensors])
            for data, picked in ((rows(48), chosen), (rows(11, seed=8), list(range(11))))
        )
        assert loss == pytest.approx(trained[name], rel=1e-5)
        assert metrics["loss"] == pytest.approx(measured[name], rel=1e-5)
        row = last_row(tmp_path / name)
        assert row["evaluation/loss"] == metrics["loss"]
        if name == "terms":
            for term in ("near", "size", "mean"):
                assert metrics[f"loss/{term}"] == pytest.approx(measured[term], rel=1e-5)
                assert row[f"loss/{term}"] == pytest.approx(trained[term], rel=1e-5)


def last_row(run_dir: Path) -> Mapping[str, float]:
    """What the last step's rows say together."""
    lines = run_files.metrics(run_dir)
    return {name: value for line in lines if line["step"] == 2 for name, value in line.items()}


def term_that_comes_late(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    loss = squared_error(model, batch)
    return {"main": loss, "aux": loss} if int(batch[0][0]) % 2 else {"main": loss}


def kind_that_changes(model: nn.Module, batch: Batch) -> Any:
    loss = squared_error(model, batch)
    return ls.Loss(loss, 1) if int(batch[0][0]) % 2 else loss


def weights_that_change(batch: Batch) -> dict[str, float]:
    return {"near": 1.0, "size": 1.0} if int(batch[0][0]) % 2 else {"near": 1.0}


def no_weights(batch: Batch) -> dict[str, float]:
    return {"near": 1.0, "size": 0.0}


CHANGING: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"loss": term_that_comes_late}, ("after step 0", "terms ['main'", "had ['main'")),
    (
        {"loss": kind_that_changes},
        (
            "after step 0: the loss is an ls.Loss for some microbatches and not for others; it must"
            " be the same kind",
        ),
    ),
    (
        {"loss": two_terms, "weight": weights_that_change},
        (
            "after step 0, microbatch ",
            ": the weight has terms ['near'",
            " and had ['near'",
            "it must have the same terms for every",
        ),
    ),
    (
        {"loss": two_terms, "weight": no_weights},
        (
            "term 'size' of the loss is ",
            " in a global batch in which its weights add up to 0; a term that counts nothing is",
        ),
    ),
]


@pytest.mark.parametrize("place", range(len(CHANGING)))
def test_a_loss_or_weight_that_changes_its_kind_or_counts_nothing_is_refused(
    pool: WorkerPool, tmp_path: Path, place: int
) -> None:
    """On one process, and on two, of which one alone may see it."""
    changes, words = CHANGING[place]
    for train_it in (train, partial(pool.run, 2, train)):
        with pytest.raises(LossError) as caught:
            train_it(str(tmp_path / train_it.__class__.__name__), changes)
        assert str(caught.value).startswith(words[0])
        assert all(each in str(caught.value) for each in words)


def train(run_dir: str, changes: dict[str, Any]) -> None:
    ls.train(recipe(**changes), run_dir=run_dir)


def near_and_boxes(output: Tensor, batch: Batch) -> dict[str, ls.Sum]:
    """The second term counts the samples of the first step's batch alone."""
    each = (output - batch[2]).square().mean(1)
    return {"near": ls.Sum(each.sum()), "boxes": ls.Sum((each * has_boxes(batch)).sum())}


def near_alone(output: Tensor, batch: Batch) -> dict[str, ls.Sum]:
    return {"near": near_and_boxes(output, batch)["near"]}


def boxes_later(output: Tensor, batch: Batch) -> ls.Loss:
    return ls.Loss(near_and_boxes(output, batch)["boxes"].total, has_boxes(batch).sum())


def has_boxes(batch: Batch) -> Tensor:
    return torch.isin(batch[0], torch.tensor(samples_at(0, 16, of=48))).float()


def train_with_boxes(run_dir: str, plan: str, loss: Any, names: Sequence[str]) -> Any:
    weights = {"near": lambda batch: len(batch[0]), "boxes": lambda batch: has_boxes(batch).sum()}
    given = recipe(
        inputs=lambda batch: batch[1],
        loss=loss,
        weight=(lambda batch: {name: weights[name](batch) for name in names}) if names else None,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    result = ls.train(given, run_dir=run_dir, plan=f"{plan},numerics=bitwise", log_every=1)
    told = [
        (event.step, event.details["term"])
        for event in result.events
        if event.name == "term-without-weight"
    ]
    return result.fingerprint, told, result.loss


BOXES = {
    "both": (near_and_boxes, ["near", "boxes"]),
    "later": (boxes_later, []),
    "near": (near_alone, ["near"]),
}


def with_boxes(run_dir: str, plans: Sequence[str]) -> dict[Any, Any]:
    rows = [(plan, name) for plan in plans for name in list(BOXES)[: 3 if len(plans) == 1 else 2]]
    found = each_of(train_with_boxes, run_dir, [(plan, *BOXES[name]) for plan, name in rows])
    return dict(zip(rows, found, strict=True))


def test_a_term_that_counts_nothing_in_a_global_batch_is_0_there_with_an_event(
    pool: WorkerPool, tmp_path: Path
) -> None:
    alone = with_boxes(str(tmp_path / "1"), ["replicate=1"])
    both = alone["replicate=1", "both"]
    assert both[1] == [(1, "boxes")]
    assert both[2] != alone["replicate=1", "near"][2], "the first step has boxes"
    for found in (alone, *pool.run(2, with_boxes, str(tmp_path / "2"), ["replicate=2", "shard=2"])):
        for (plan, name), result in found.items():
            if name == "both":
                assert result == both, plan
            elif name == "later":
                assert result[1:] == ([(1, "loss")], 0.0), plan
