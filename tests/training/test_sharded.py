"""The shard axis under `ls.train` and `Session`: what comes out is what one process gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.subjects import network, recipe, rows, sgd, squared_error

import lockstep as ls
from lockstep.base.errors import PlanError, RecipeError
from lockstep.testing.pool import WorkerPool

PLANS = {"shard=2": 2, "shard=3": 3, "replicate=2,shard=2": 4}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def train(
    plan: str, run_dir: str, changes: dict[str, Any], hooks: Sequence[ls.Hook] = ()
) -> ls.Result:
    return ls.train(
        recipe(optimizer=adamw, **changes),
        plan=f"{plan},numerics=bitwise",
        run_dir=run_dir,
        hooks=hooks,
    )


def alone_and_sharded(
    pool: WorkerPool, path: Path, plan: str, function: Any
) -> tuple[Any, list[Any]]:
    (alone,) = pool.run(1, function, "replicate=1", str(path / "alone"))
    return alone, pool.run(PLANS[plan], function, plan, str(path / "sharded"))


def needs_values() -> nn.Module:
    model = network()
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(model[0].weight.numpy() * 2))
    return model


def train_what_needs_values(plan: str, run_dir: str) -> tuple[str, list[str]]:
    result = train(plan, run_dir, {"model": needs_values})
    return result.fingerprint, [
        event.details["reason"] for event in result.events if event.name == "model-built-whole"
    ]


def test_a_factory_that_needs_values_is_run_whole_and_an_event_says_why(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (fingerprint, none), sharded = alone_and_sharded(
        pool, tmp_path, "shard=2", train_what_needs_values
    )
    assert none == []
    for found, (reason,) in sharded:
        assert found == fingerprint
        assert "test_sharded.py" in reason


def distances(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return (output - batch[2]).abs().mean(1)


def collected(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0], output[:, 0]


def in_order(index: Tensor, output: Tensor) -> float:
    return float(output.sum()) if index.tolist() == list(range(len(index))) else -1.0


def evaluate(plan: str, run_dir: str) -> dict[str, float]:
    metrics = {"distance": ls.Mean(distances), "sum": ls.Gathered(collected, in_order)}
    evaluation = ls.Evaluation(data=rows(37, seed=9), every=1, metrics=metrics)
    error = {
        "inputs": lambda batch: batch[1],
        "loss": lambda output, batch: ((output - batch[2]) ** 2).mean(),
    }
    return train(plan, run_dir, {**error, "evaluation": evaluation}).metrics


@pytest.mark.parametrize("plan", PLANS)
def test_an_evaluation_counts_every_sample_once_and_in_order(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    alone, sharded = alone_and_sharded(pool, tmp_path, plan, evaluate)
    assert alone["sum"] != -1.0
    assert sharded == [alone] * PLANS[plan]


def train_a_pair_of_models(plan: str, run_dir: str) -> list[str]:
    """Each learns from the other, as in a GAN."""
    with ls.Session(run_dir=run_dir, plan=f"{plan},numerics=bitwise") as session:
        one, first = session.prepare(network, adamw)
        two, second = session.prepare(network, adamw)
        for step in session.steps(rows(48), global_batch=20, microbatch=4, steps=3):
            for batch in step.microbatches(dummies=True):
                step.backward(
                    ((one(batch[1]) - two(batch[1]).detach()) ** 2).mean()
                    + squared_error(one, batch),
                    first,
                )
            step.commit(first)
            for batch in step.microbatches(dummies=True):
                step.backward(
                    ((two(batch[1]) - one(batch[1])) ** 2).mean() + two(batch[1]).mean(), second
                )
            step.commit(second, clip_norm=0.1)
        return [ls.fingerprint(one), ls.fingerprint(two)]


@pytest.mark.parametrize("plan", ["shard=2", "replicate=2,shard=2"])
def test_two_models_that_learn_from_each_other(pool: WorkerPool, tmp_path: Path, plan: str) -> None:
    alone, sharded = alone_and_sharded(pool, tmp_path, plan, train_a_pair_of_models)
    assert sharded == [alone] * PLANS[plan]
    assert alone[0] != alone[1]


def train_with_an_average(plan: str, run_dir: str) -> bytes:
    train(plan, run_dir, {}, hooks=[ls.ExponentialMovingAverage(0.5)])
    return (Path(run_dir) / "model_average.safetensors").read_bytes()


def test_a_moving_average_is_saved_whole(pool: WorkerPool, tmp_path: Path) -> None:
    alone, sharded = alone_and_sharded(pool, tmp_path, "shard=3", train_with_an_average)
    assert sharded == [alone] * 3


def train_with_wrong_blocks(run_dir: str) -> str:
    try:
        ls.train(recipe(blocks=["layers.*"]), plan="shard=2", run_dir=run_dir)
    except RecipeError as error:
        return str(error)
    return "it trained"


def test_a_block_name_that_matches_nothing_is_refused_on_all_ranks(
    pool: WorkerPool, tmp_path: Path
) -> None:
    one, other = pool.run(2, train_with_wrong_blocks, str(tmp_path / "run"))
    assert one == other
    assert one.startswith(
        "the recipe's blocks have 'layers.*', which matches no module of the model; modules are 0,"
        " 1, 2"
    )


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def refused(model: type[nn.Module], run_dir: str) -> str:
    try:
        ls.train(recipe(model=model, optimizer=sgd), plan="shard=2", run_dir=run_dir)
    except RecipeError as error:
        return str(error)
    return "it trained"


def test_a_parameter_without_dims_cannot_be_cut(pool: WorkerPool, tmp_path: Path) -> None:
    assert (
        pool.run(2, refused, Scalar, str(tmp_path / "run"))
        == [
            "the parameter 'scale' is a scalar, which FSDP2 cannot shard; give it one dim,"
            " torch.zeros(1), or choose replicate"
        ]
        * 2
    )


def test_a_parameter_that_is_not_contiguous_cannot_be_cut(pool: WorkerPool, tmp_path: Path) -> None:
    one, other = pool.run(2, refused, Turned, str(tmp_path / "run"))
    assert one == other
    assert one.startswith(
        "the parameter 'weight' is not contiguous (strides (1, 6)), and FSDP2 shards contiguous"
        " rows; "
    )


class Mixed(nn.Module):
    """Adds its second input, unless it is the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, *, others: Sequence[Tensor]) -> Tensor:
        y: Tensor = self.linear(x)
        return y if others[0] is x else y + others[0]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.skipped, self.mixed = nn.Linear(16, 16), Mixed()

    def forward(self, x: Tensor) -> Tensor:
        words = self.first(x)[:, None] * torch.linspace(-1, 1, 5)[:, None]
        words = words + self.attention(words, words, words, need_weights=False)[0]
        words = self.mixed(words, others=[words])  # after a block that is left out
        y: Tensor = self.last(self.mixed(words, others=[words.tanh()]).mean(1))
        return y


def train_what_attends(plan: str, run_dir: str) -> str:
    return train(
        plan, run_dir, {"model": Attending, "blocks": ["attention", "skipped", "mixed"]}
    ).fingerprint


def test_a_tensor_that_a_block_is_given_several_times_is_one(
    pool: WorkerPool, tmp_path: Path
) -> None:
    fingerprint, sharded = alone_and_sharded(pool, tmp_path, "shard=2", train_what_attends)
    assert sharded == [fingerprint] * 2


def penalised(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    x = batch[1].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return squared_error(model, batch) + slope.square().mean()


def adversarial(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    x = batch[1].clone().requires_grad_()
    (slope,) = torch.autograd.grad(squared_error(model, [batch[0], x, batch[2]]), x)
    return squared_error(model, [batch[0], batch[1] + 0.1 * slope.sign(), batch[2]])


def train_with(loss: Any, plan: str, run_dir: str) -> str:
    return train(
        plan, run_dir, {"loss": loss, "data": rows(44), "global_batch": 12, "blocks": ["0", "2"]}
    ).fingerprint


def test_a_gradient_that_is_differentiated_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    refusal = (
        r"^the shard axis with a gradient that is itself differentiated .*; use replicate, under"
        r" which parameters are plain tensors$"
    )
    with pytest.raises(PlanError, match=refusal):
        pool.run(2, train_with, penalised, "shard=2", str(tmp_path / "shard"))
    (alone,) = pool.run(1, train_with, penalised, "replicate=1", str(tmp_path / "alone"))
    assert set(pool.run(2, train_with, penalised, "replicate=2", str(tmp_path / "replicate"))) == {
        alone
    }


def test_a_gradient_of_the_inputs_is_not(pool: WorkerPool, tmp_path: Path) -> None:
    """Three microbatches a step on two ranks: one computes a dummy."""
    (alone,) = pool.run(1, train_with, adversarial, "replicate=1", str(tmp_path / "alone"))
    assert set(pool.run(2, train_with, adversarial, "shard=2", str(tmp_path / "shard"))) == {alone}
